"""Turns with updates that arrived while the parameter server waited for them."""

from __future__ import annotations

import time

import pytest
from support.world import World

from vcasgd.errors import Fenced
from vcasgd.parameter_server.reports import REPORT_SECONDS
from vcasgd.parameter_server.shard import VIEW_SECONDS, Shard
from vcasgd.store.tensors.updates import Arrivals, wait_for_entries


def arrivals(world: World, shard: Shard) -> Arrivals:
    return wait_for_entries(world.tensors, dict([shard.position]), 1.0, 32)[shard.stream]


def calls(world: World) -> dict[str, int]:
    stats = world.tensors.info("commandstats")
    return {name.removeprefix("cmdstat_"): one["calls"] for name, one in stats.items()}


def test_it_blends_them_without_another_look_at_the_server(world: World) -> None:
    shard = world.shard()
    shard.turn(arrivals(world, shard))  # The first turn looks.
    world.push(0, 0, 2)
    arrived = arrivals(world, shard)
    world.tensors.config_resetstat()

    assert shard.turn(arrived) == 1

    assert not calls(world).keys() & {"xrange", "hkeys", "smembers"}
    assert world.snapshots.version() == 1
    world.assert_exact()


def test_it_reads_the_stream_if_the_cursor_has_moved(world: World) -> None:
    shard = world.shard()
    world.push(0, 0, 2)
    stale = arrivals(world, shard)
    world.push(1, 0, 2)

    assert shard.turn() == 2
    assert shard.turn(Arrivals("1-1", stale.entries)) == 0

    world.assert_exact()


def test_a_requested_pin_is_served_between_updates(world: World) -> None:
    shard = world.shard()
    shard.turn()
    world.snapshots.request_pin("wanted")
    time.sleep(VIEW_SECONDS)
    world.push(0, 0, 2)

    shard.turn(arrivals(world, shard))

    assert world.snapshots.pinned("wanted") is not None


def test_a_superseded_server_publishes_nothing(world: World) -> None:
    old = world.shard(token=1)
    old.turn()
    world.push(0, 0, 2)
    arrived = arrivals(world, old)
    world.shard(token=2).turn()

    with pytest.raises(Fenced):
        old.turn(arrived)

    world.assert_exact()


def test_completed_subtasks_are_reported_at_once_and_progress_later(world: World) -> None:
    shard = world.shard()
    shard.turn()
    world.push(0, 0, 2)
    shard.turn(arrivals(world, shard))
    reported = world.jobs.get(world.job).totals.get("samples", 0)
    assert reported == 0

    world.push(0, 2, 4)
    shard.turn(arrivals(world, shard))
    assert world.jobs.get(world.job).totals["samples"] == 4

    world.push(1, 0, 2)
    shard.turn(arrivals(world, shard))
    time.sleep(REPORT_SECONDS)
    shard.turn(Arrivals("0-0", []))
    assert world.jobs.get(world.job).totals["samples"] == 6
