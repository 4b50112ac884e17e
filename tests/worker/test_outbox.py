"""A worker's updates until they are applied, on real servers and with a real shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import RedisServer
from support.servers import KINDS, Fault, running_server, url_of, wired
from support.world import World

from vcasgd.errors import SnapshotMissing
from vcasgd.store.connection import connect
from vcasgd.store.tensors.updates import Header, UpdateSender
from vcasgd.worker.outbox import Outbox, Settled

Eventually = Callable[..., Any]


@pytest.fixture(scope="module", params=KINDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    with running_server(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.fixture
def world(server: RedisServer, tmp_path: Path) -> Iterator[World]:
    ledger, tensors = connect(url_of(server, 0)), connect(url_of(server, 1))
    yield World(ledger, tensors, tmp_path / "storage")
    for client in (ledger, tensors):
        client.close()


@pytest.fixture
def outbox(world: World) -> Iterator[Outbox]:
    outbox = Outbox(world.sender)
    try:
        yield outbox
    finally:
        outbox.close()


def submit(
    world: World, outbox: Outbox, subtask: int, start: int, stop: int, **changes: Any
) -> Header:
    header, payload = world.update(subtask, start, stop, **{"token": 1, **changes})
    outbox.submit(header, world.plan.epoch_of(subtask), payload)
    return header


def flushed(outbox: Outbox) -> None:
    assert outbox.flush(10), "not everything came into the stream"


def settle(outbox: Outbox) -> Settled:
    outbox.look()
    return outbox.collect()


class TestSending:
    def test_in_the_background_and_in_order(self, world: World, outbox: Outbox) -> None:
        headers = [submit(world, outbox, 0, start, start + 1) for start in range(4)]

        flushed(outbox)

        sent = [Header.parse(entry.header) for entry in world.reader.read(10)]
        assert sent == headers
        assert (outbox.sent, outbox.sent_again, outbox.discarded) == (4, 0, 0)
        assert outbox.sent_bytes == sum(header.size for header in headers)
        assert outbox.unapplied == 4
        assert outbox.subtasks() == {0}

    def test_applied_ones_leave(self, world: World, outbox: Outbox) -> None:
        submit(world, outbox, 0, 0, 2)
        submit(world, outbox, 1, 0, 4)
        flushed(outbox)
        assert settle(outbox).rework == frozenset()
        assert outbox.unapplied == 2

        world.shard(token=5).turn()

        assert outbox.look() == (2, 5)
        assert (outbox.unapplied, outbox.subtasks()) == (0, frozenset())

    def test_nothing_to_ask_for_brings_the_version(self, world: World, outbox: Outbox) -> None:
        assert outbox.look() == (0, 0)

    def test_up_to_where_the_updates_of_a_lease_go(self, world: World, outbox: Outbox) -> None:
        submit(world, outbox, 0, 0, 1)
        submit(world, outbox, 0, 1, 3)
        flushed(outbox)

        assert outbox.reached(0, token=1) == 3
        assert outbox.reached(0, token=2) == outbox.reached(1, token=1) == 0

    def test_a_flush_that_takes_too_long(self, world: World, outbox: Outbox) -> None:
        world.lose_tensors()
        submit(world, outbox, 0, 0, 2)

        assert not outbox.flush(0.05)
        assert outbox.unapplied == 1, "it is kept"

    def test_closed_it_ends_its_thread(self, world: World) -> None:
        outbox = Outbox(world.sender)
        world.lose_tensors()
        submit(world, outbox, 0, 0, 2)

        outbox.close()

        assert not outbox._thread.is_alive()


class TestLost:
    def test_pushed_again_when_the_server_came_back_empty(
        self, world: World, outbox: Outbox
    ) -> None:
        shard = world.shard()
        shard.turn()
        submit(world, outbox, 0, 0, 2)
        submit(world, outbox, 0, 2, 4)
        flushed(outbox)
        world.lose_tensors()
        with pytest.raises(SnapshotMissing):
            outbox.look()
        assert outbox.unapplied == 2, "they are kept"
        shard.turn()

        assert settle(outbox).rework == frozenset()
        flushed(outbox)
        shard.turn()

        assert settle(outbox).rework == frozenset()
        assert (outbox.sent_again, outbox.unapplied) == (2, 0)
        assert world.snapshots.read().record.positions == {0: 4}
        world.assert_exact()

    def test_waits_for_a_snapshot_to_come_back(
        self, world: World, outbox: Outbox, eventually: Eventually
    ) -> None:
        shard = world.shard()
        shard.turn()
        world.lose_tensors()
        submit(world, outbox, 0, 0, 4)
        assert not outbox.flush(0.05)

        shard.turn()

        flushed(outbox)
        shard.turn()
        world.assert_exact()
        assert world.snapshots.version() == 1

    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_a_cut_connection_loses_and_repeats_nothing(
        self, world: World, server: RedisServer, moment: Any
    ) -> None:
        """At each command of a push in turn: log in, payload, script."""
        fired = []
        for at in range(1, 20):
            subtask, position = divmod(at - 1, world.plan.size(0))
            fault = Fault(at, moment)
            with wired(server, 1, fault) as client:
                outbox = Outbox(UpdateSender(client, world.keys))
                try:
                    fault.arm()
                    submit(world, outbox, subtask, position, position + 1, token=at)
                    flushed(outbox)
                finally:
                    outbox.close()
            fired.append(fault.fired)
            assert world.reader.waiting() == 1
            world.shard().turn()
            world.assert_exact()
        assert fired[0]
        assert not fired[-1], "there are more commands in a push"
        assert world.snapshots.version() == len(fired)
        assert world.rejected() == {}


class TestRefused:
    def test_a_rejected_one_has_to_be_trained_again(self, world: World, outbox: Outbox) -> None:
        submit(world, outbox, 0, 0, 2, checksum=1)
        flushed(outbox)
        world.shard().turn()

        settled = settle(outbox)

        assert settled.rejected == ((0, "checksum"),)
        assert settled.rework == {0}
        assert outbox.unapplied == 0
        assert settle(outbox).rework == frozenset(), "said once"

    def test_what_follows_a_rejected_one_too(self, world: World, outbox: Outbox) -> None:
        shard = world.shard()
        submit(world, outbox, 0, 0, 2, checksum=1)
        submit(world, outbox, 0, 2, 4)
        flushed(outbox)
        shard.turn()

        assert settle(outbox).rework == {0}
        assert world.sender.begin(0, 0, 4, 1) == 0

        submit(world, outbox, 0, 0, 4)
        flushed(outbox)
        shard.turn()
        assert settle(outbox).rework == frozenset()
        assert world.snapshots.read().record.positions == {0: 4}
        world.assert_exact()

    def test_a_gap_before_it_has_to_be_trained(self, world: World, outbox: Outbox) -> None:
        submit(world, outbox, 0, 2, 4)
        flushed(outbox)

        assert outbox.subtasks() == {0}
        assert settle(outbox).rework == {0}
        assert outbox.discarded == 1

    def test_what_another_did_meanwhile_is_done(self, world: World, outbox: Outbox) -> None:
        world.push(0, 0, 4)

        submit(world, outbox, 0, 0, 2)
        flushed(outbox)

        assert settle(outbox).rework == frozenset()
        assert (outbox.discarded, outbox.unapplied) == (1, 0)

    def test_of_a_finished_epoch_it_is_done(self, world: World, outbox: Outbox) -> None:
        for subtask in range(3):
            world.push(subtask, 0, 4)
        world.shard().turn()

        submit(world, outbox, 1, 0, 4)
        flushed(outbox)

        assert settle(outbox).rework == frozenset()
        assert outbox.discarded == 1

    def test_under_a_lost_lease_it_is_not_wanted(self, world: World, outbox: Outbox) -> None:
        world.sender.begin(0, 0, 4, token=2)

        submit(world, outbox, 0, 0, 2, token=1)
        flushed(outbox)

        assert settle(outbox).rework == frozenset()
        assert (outbox.discarded, outbox.unapplied) == (1, 0)
        assert world.reader.waiting() == 0

    def test_forgotten_it_is_neither_sent_nor_done_again(
        self, world: World, outbox: Outbox
    ) -> None:
        world.lose_tensors()
        submit(world, outbox, 0, 0, 2)
        submit(world, outbox, 1, 0, 2)

        outbox.forget(0)

        assert outbox.subtasks() == {1}
        world.install()
        flushed(outbox)
        assert [Header.parse(each.header).subtask for each in world.reader.read(9)] == [1]


class TestWatching:
    def test_what_others_pushed_until_it_is_applied(self, world: World, outbox: Outbox) -> None:
        world.push(0, 0, 4)
        outbox.watch(0, 0, 4)
        outbox.watch(0, 0, 4)
        assert outbox.unapplied == 0, "it takes no room"
        assert settle(outbox).rework == frozenset()
        assert outbox.subtasks() == {0}

        world.shard().turn()

        assert settle(outbox).rework == frozenset()
        assert outbox.subtasks() == frozenset()

    def test_lost_it_has_to_be_trained(self, world: World, outbox: Outbox) -> None:
        shard = world.shard()
        shard.turn()
        world.push(0, 0, 4)
        outbox.watch(0, 0, 4)
        world.lose_tensors()
        shard.turn()

        assert settle(outbox).rework == {0}
        assert outbox.subtasks() == frozenset()
