"""The parameter server's shard on a real server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.harness import RedisServer
from support.servers import Fault, running_server, through_proxy
from support.waiting import await_truth
from support.world import MakeWorld, World

from vcasgd.errors import (
    Fenced,
    StoreUnavailable,
)
from vcasgd.limits import MAX_LOGGED
from vcasgd.parameter_server import reports
from vcasgd.parameter_server.blend import MAX_UPDATES
from vcasgd.parameter_server.shard import VIEW_SECONDS, Shard
from vcasgd.store.ledger.leases import Lease
from vcasgd.store.tensors.snapshot import encode_integers
from vcasgd.store.tensors.updates import Arrivals, wait_for_entries

VC_ASGD = {"rule": "vc-asgd", "alpha": 0.75}


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
class TestApplies:
    def test_a_difference_is_added(self, make_world: MakeWorld, codec: str) -> None:
        world = make_world(update={"rule": "async-local-sgd", "eta": 0.5, "codec": codec})
        delta = torch.linspace(-1, 1, world.layout.floats).bfloat16().float()

        world.push(0, 0, 2, vector=delta, last=True)
        assert world.shard().turn() == 1

        # Running statistics are averaged, never summed.
        expected = torch.cat([0.5 * delta[:-1], torch.lerp(torch.zeros(1), delta[-1:], 0.5)])
        assert torch.equal(world.vector(), expected)
        world_snapshot = world.snapshots.read()
        assert world_snapshot.record.positions == {0: 2}
        assert world_snapshot.meta.version == 1

    def test_weights_are_blended(self, make_world: MakeWorld, codec: str) -> None:
        world = make_world(update={**VC_ASGD, "codec": codec})
        local = torch.linspace(-1, 1, world.layout.floats).bfloat16().float()

        world.push(0, 0, 2, vector=local)
        world.push(1, 0, 2, vector=local, base=1)
        world.shard().turn()

        expected = torch.lerp(torch.lerp(torch.zeros(1), local, 0.25), local, 0.25)
        assert torch.equal(world.vector(), expected)


class TestBatches:
    def test_a_batch_is_bounded(self, make_world: MakeWorld) -> None:
        world = make_world(samples=60, subtasks_per_epoch=60)
        for subtask in range(MAX_UPDATES + 5):
            world.push(subtask, 0, 1)
        shard = world.shard()

        assert shard.turn() == MAX_UPDATES
        chunks = world.tensor_keys("s:")
        assert chunks == {"s:0.0:0", f"s:{MAX_UPDATES}.1:0"}, "one publication for all of them"
        assert [shard.turn(), shard.turn()] == [5, 0]
        world.assert_exact()

    def test_the_end_of_an_epoch_gets_a_version_of_its_own(self, world: World) -> None:
        """It is then evaluated exactly, although updates of the next epoch wait."""
        for subtask in (3, 0, 1, 2, 4):
            world.push(subtask, 0, 4)
        shard = world.shard()

        assert shard.turn() == 4
        assert shard.turn() == 1

        pinned, floats = world.snapshots.fetch_pinned("epoch-1")
        assert pinned.record.finished == 1
        assert world.positions(pinned.record) == {3: 4}
        assert floats[: world.plan.samples].tolist() == world.expected_counts(pinned.record)
        world.assert_exact()

    def test_staleness_is_counted_update_by_update(self, world: World) -> None:
        world.push(0, 0, 1, base=0)
        world.push(0, 1, 2, base=0)
        world.push(0, 2, 3, base=2)
        world.push(0, 3, 4, base=1000)  # a version that was lost
        world.shard().turn()

        totals = world.snapshots.read().meta.totals
        assert (totals.updates, totals.samples) == (4, 4)
        assert (totals.staleness_sum, totals.staleness_max) == (0 + 1 + 0 + 0, 1)
        assert totals.loss_sum == 4.0

    def test_counters_never_run_backwards(self, world: World) -> None:
        world.push(0, 0, 1, integers=encode_integers(torch.tensor([7])))
        world.push(1, 0, 1, integers=encode_integers(torch.tensor([5])))
        world.shard().turn()

        assert world.snapshots.read().meta.integer_vector().tolist() == [7]


class TestReports:
    def test_progress_totals_and_finished_work(self, world: World) -> None:
        leases = world.leases("a")
        for _ in range(4):
            assert isinstance(leases.acquire(), Lease)
        for subtask in range(3):
            world.push(subtask, 0, 4)
        world.push(3, 0, 2)

        shard = world.started_shard()
        shard.turn()

        job = world.jobs.get(world.job)
        assert (job.version, job.finished_epochs) == (4, 1)
        assert (job.totals["updates"], job.totals["samples"]) == (4, 14)
        assert list(world.partition().leased) == [3]
        world.partition().assert_whole()

    def test_points_of_the_metrics_are_a_second_apart(self, world: World) -> None:
        shard = world.started_shard()
        world.apply(shard, 0, 0, 2)
        assert world.jobs.metrics(world.job) == []

        world.now += 2
        world.apply(shard, 0, 2, 4, base=0)
        world.now += 5
        shard.turn()  # no updates, so no new point

        (point,) = world.jobs.metrics(world.job)
        assert (point["at"], point["version"], point["samples"]) == (world.now - 5, 2, 4)
        assert (point["updates_per_second"], point["samples_per_second"]) == (1.0, 2.0)
        assert (point["loss"], point["staleness_mean"]) == (1.0, 0.5)
        assert point["waiting"] == 0

    def test_points_have_the_means_of_what_steps_logged(self, world: World) -> None:
        shard = world.started_shard()
        for start, logged in enumerate([(("norm", 6.0, 3),), (("norm", 4.0, 1), ("acc", 0.5, 1))]):
            world.push(0, start, start + 1, base=0, logged=logged)
        # A repeated update counts nothing.
        world.push(0, 1, 2, base=0, logged=(("norm", 100.0, 1),))
        world.now += 2
        shard.turn()

        (point,) = world.jobs.metrics(world.job)
        assert point["logged"] == {"norm": 2.5, "acc": 0.5}

    def test_names_beyond_the_limit_are_left_out(self, world: World) -> None:
        shard = world.started_shard()
        for start in range(2):
            names = [f"{start}-{number}" for number in range(MAX_LOGGED)]
            world.push(0, start, start + 1, base=0, logged=tuple((each, 1.0, 1) for each in names))
        world.now += 2
        shard.turn()

        (point,) = world.jobs.metrics(world.job)
        assert len(point["logged"]) == MAX_LOGGED

    def test_points_of_a_long_job_are_further_apart(self, world: World) -> None:
        world.ledger.hset(world.ledger_keys.record, "created_at", world.now - 20_000)
        shard = world.started_shard()
        for position in range(4):
            world.now += 6
            world.apply(shard, 0, position, position + 1)

        first, second = world.jobs.metrics(world.job)
        assert second["at"] - first["at"] == 12
        assert second["updates"] - first["updates"] == 2

    def test_a_ledger_that_is_away_stops_no_training(
        self, world: World, server: RedisServer
    ) -> None:
        fault = Fault(at=1)
        with through_proxy(server, 0, fault) as ledger:
            shard = world.started_shard(ledger=ledger)
            for position in range(3):
                world.push(0, position, position + 1)
                fault.arm()
                with pytest.raises(StoreUnavailable):
                    shard.turn()
                assert world.snapshots.version() == position + 1
            shard.turn()

        assert world.jobs.get(world.job).version == 3


# --- updates that arrived while the parameter server waited for them ---------------------------


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
    shard = world.started_shard()
    world.snapshots.request_pin("wanted")
    time.sleep(VIEW_SECONDS)
    world.push(0, 0, 2)

    shard.turn(arrivals(world, shard))

    assert world.snapshots.pinned("wanted") is not None


def test_a_superseded_server_publishes_nothing(world: World) -> None:
    old = world.started_shard(token=1)
    world.push(0, 0, 2)
    arrived = arrivals(world, old)
    world.shard(token=2).turn()

    with pytest.raises(Fenced):
        old.turn(arrived)

    world.assert_exact()


def test_completed_subtasks_are_reported_at_once_and_progress_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(reports, "time", SimpleNamespace(monotonic=lambda: now[0]))
    shard = world.started_shard()
    world.push(0, 0, 2)
    shard.turn(arrivals(world, shard))
    reported = world.jobs.get(world.job).totals.get("samples", 0)
    assert reported == 0

    world.push(0, 2, 4)
    shard.turn(arrivals(world, shard))
    assert world.jobs.get(world.job).totals["samples"] == 4

    world.push(1, 0, 2)
    shard.turn(arrivals(world, shard))
    now[0] += reports.REPORT_SECONDS
    shard.turn(Arrivals("0-0", []))
    assert world.jobs.get(world.job).totals["samples"] == 6


# --- a ledger that is frozen -------------------------------------------------------------------


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    with (
        running_server("valkey", tmp_path / "ledger") as ledger,
        running_server("valkey", tmp_path / "tensors") as tensors,
    ):
        yield ledger, tensors


def test_a_takeover_serves_before_the_ledger_has_its_report(
    servers: tuple[RedisServer, RedisServer], tmp_path: Path
) -> None:
    # Given an update that waits for a parameter server
    ledger, tensors = servers
    world = World(ledger.connection, tensors.connection, tmp_path / "storage")
    world.push(0, 0, 4)
    with ThreadPoolExecutor(1) as executor:
        shard = world.shard(executor=executor)

        # When one takes over while the ledger is frozen, then it applies and publishes it
        ledger.process.freeze()
        assert shard.turn() == 1
        assert world.snapshots.version() == 1
        world.assert_exact()

        # And the ledger gets the report of the takeover afterwards
        ledger.process.thaw()
        reported = world.ledger_keys.shards
        await_truth(lambda: shard.turn() or world.ledger.hget(reported, "0:version") == b"1")
        assert world.jobs.get(world.job).totals["applied"] == 4
