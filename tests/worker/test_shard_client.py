"""A worker's client for a shard, on real servers and with a real parameter server's shard."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import RedisServer
from support.servers import KINDS, Fault, running_server, through_proxy, url_of
from support.shard_clients import client_of, flush, settle, submit, version_of
from support.world import World

from vcasgd.errors import SnapshotMissing, StoreDenied
from vcasgd.store.connection import connect
from vcasgd.store.tensors.header import Header
from vcasgd.worker import push_queue as module
from vcasgd.worker.shard_client import ShardClient

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
def client(world: World) -> Iterator[ShardClient]:
    client = client_of(world)
    try:
        yield client
    finally:
        client.close()


def counts(client: ShardClient, *names: str) -> tuple[int, ...]:
    return tuple(client.updates.counts()[name] for name in names)


class TestSending:
    def test_a_large_update_waits_in_the_worker_for_the_one_before(
        self,
        world: World,
        client: ShardClient,
        eventually: Eventually,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(module, "PIPELINED_BYTES", 0)
        headers = [submit(world, client, 0, start, start + 1) for start in range(3)]
        shard = world.shard()

        for header in headers[:2]:
            eventually(world.reader.waiting)
            (entry,) = world.reader.read(10)
            assert Header.parse(entry.header).update == header.update
            assert shard.turn() == 1
        eventually(world.reader.waiting)
        submit(world, client, 0, 3, 4)
        flush(client)

        assert world.reader.waiting() == 2, "a worker that leaves waits for nothing"

    def test_updates_are_pushed_in_the_background_and_in_order(
        self, world: World, client: ShardClient
    ) -> None:
        headers = [submit(world, client, 0, start, start + 1) for start in range(4)]

        flush(client)

        sent = [Header.parse(entry.header) for entry in world.reader.read(10)]
        assert sent == headers
        assert counts(client, "pushes", "pushed_again", "discarded") == (4, 0, 0)
        assert client.updates.counts()["pushed_bytes"] == sum(header.size for header in headers)
        assert client.updates.unapplied == 4
        assert client.updates.subtasks() == {0}

    def test_applied_updates_are_dropped(self, world: World, client: ShardClient) -> None:
        submit(world, client, 0, 0, 2)
        submit(world, client, 1, 0, 4)
        flush(client)
        assert settle(client).rework == frozenset()
        assert client.updates.unapplied == 2

        world.shard(token=5).turn()

        assert version_of(client) == (2, 5)
        assert (client.updates.unapplied, client.updates.subtasks()) == (0, frozenset())

    def test_settling_nothing_returns_the_version(self, world: World, client: ShardClient) -> None:
        assert version_of(client) == (0, 0)

    def test_reached_is_the_end_of_a_leases_updates_here(
        self, world: World, client: ShardClient
    ) -> None:
        submit(world, client, 0, 0, 1)
        submit(world, client, 0, 1, 3)
        flush(client)

        assert client.updates.reached(0, token=1) == 3
        assert client.updates.reached(0, token=2) == client.updates.reached(1, token=1) == 0

    def test_a_flush_is_bounded(self, world: World, client: ShardClient) -> None:
        world.lose_tensors()
        submit(world, client, 0, 0, 2)

        assert not client.updates.flush(0.05)
        assert client.updates.unapplied == 1, "it is kept"

    def test_close_ends_the_push_thread(self, world: World) -> None:
        client = client_of(world)
        world.lose_tensors()
        submit(world, client, 0, 0, 2)

        client.close()

        assert not client.updates._thread.is_alive()


class TestBugs:
    """An unexpected error in a thread reaches the training thread."""

    def test_an_error_of_the_push_thread_is_raised(
        self, world: World, client: ShardClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client._sender, "push", raising(TypeError("a bug")))
        submit(world, client, 0, 0, 2)

        assert not client.updates.flush(10), "it returns at once"
        with pytest.raises(TypeError, match="a bug"):
            settle(client)

    def test_an_error_of_the_request_thread_is_raised(
        self, client: ShardClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client._sender, "status", raising(TypeError("a bug")))
        with pytest.raises(TypeError, match="a bug"):
            client.settle().result(10)

        monkeypatch.undo()
        assert version_of(client) == (0, 0), "the thread is still running"


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_args: Any) -> Any:
        raise error

    return fail


class TestDenied:
    @pytest.fixture
    def reader(self, world: World, server: RedisServer) -> Iterator[ShardClient]:
        """A client whose pushes are refused."""
        rules = ["on", ">secret", "~*", "&*", "+@all", "-evalsha"]
        world.tensors.execute_command("ACL", "SETUSER", "reader", *rules)
        node = connect(f"redis://reader:secret@127.0.0.1:{server.files.port}/1")
        client = client_of(world, node)
        yield client
        client.close()
        node.close()
        world.tensors.execute_command("ACL", "DELUSER", "reader")

    def test_refused_pushes_are_counted_and_an_error_until_they_are_accepted(
        self,
        world: World,
        reader: ShardClient,
        eventually: Eventually,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        # Given pushes that the server refuses for more than a moment
        began = time.monotonic()
        submit(world, reader, 0, 0, 4)

        def is_refused() -> bool:
            try:
                reader.updates.check_access()
            except StoreDenied:
                return True
            return False

        eventually(is_refused)

        # Then they are retried at growing intervals, and named once
        (denied,) = counts(reader, "denied")
        assert 3 <= denied <= 6 + 2 * (time.monotonic() - began)
        assert sum("refuses pushes" in each for each in caplog.messages) == 1

        # When the server accepts them
        world.tensors.execute_command("ACL", "SETUSER", "reader", "+evalsha")

        # Then nothing is lost
        flush(reader)
        assert not is_refused()
        assert counts(reader, "pushes") == (1,)


class TestLost:
    def test_updates_are_pushed_again_to_a_server_that_came_back_empty(
        self, world: World, client: ShardClient
    ) -> None:
        shard = world.shard()
        shard.turn()
        submit(world, client, 0, 0, 2)
        submit(world, client, 0, 2, 4)
        flush(client)
        world.lose_tensors()
        with pytest.raises(SnapshotMissing):
            version_of(client)
        assert client.updates.unapplied == 2, "they are kept"
        shard.turn()

        assert settle(client).rework == frozenset()
        flush(client)
        shard.turn()

        assert settle(client).rework == frozenset()
        assert counts(client, "pushed_again", "unapplied") == (2, 0)
        assert world.positions() == {0: 4}
        world.assert_exact()

    def test_waits_for_a_snapshot_to_come_back(
        self, world: World, client: ShardClient, eventually: Eventually
    ) -> None:
        shard = world.shard()
        shard.turn()
        world.lose_tensors()
        submit(world, client, 0, 0, 4)
        assert not client.updates.flush(0.05)

        shard.turn()

        flush(client)
        shard.turn()
        world.assert_exact()
        assert world.snapshots.version() == 1

    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_a_cut_connection_loses_and_repeats_nothing(
        self, world: World, server: RedisServer, moment: Any
    ) -> None:
        """The connection is cut at each command of a push: login, payload, script."""
        fired = []
        for at in range(1, 20):
            subtask, position = divmod(at - 1, world.plan.size(0))
            fault = Fault(at, moment)
            with through_proxy(server, 1, fault) as connection:
                client = client_of(world, connection)
                try:
                    fault.arm()
                    submit(world, client, subtask, position, position + 1, token=at)
                    flush(client)
                finally:
                    client.close()
            fired.append(fault.fired)
            assert world.reader.waiting() == 1
            world.shard().turn()
            world.assert_exact()
        assert fired[0]
        assert not fired[-1], "a push has more commands"
        assert world.snapshots.version() == len(fired)
        assert world.rejected() == {}


class TestRefused:
    def test_a_rejected_one_is_trained_again(self, world: World, client: ShardClient) -> None:
        submit(world, client, 0, 0, 2, checksum=1)
        flush(client)
        world.shard().turn()

        settled = settle(client)

        assert settled.rejected == ((0, "checksum"),)
        assert settled.rework == {0}
        assert client.updates.unapplied == 0
        assert settle(client).rework == frozenset(), "reported once"

    def test_updates_after_a_rejected_one_are_trained_again(
        self, world: World, client: ShardClient
    ) -> None:
        shard = world.shard()
        submit(world, client, 0, 0, 2, checksum=1)
        submit(world, client, 0, 2, 4)
        flush(client)
        shard.turn()

        assert settle(client).rework == {0}
        assert world.sender.begin(0, 0, 4, 1) == 0

        submit(world, client, 0, 0, 4)
        flush(client)
        shard.turn()
        assert settle(client).rework == frozenset()
        assert world.positions() == {0: 4}
        world.assert_exact()

    def test_a_gap_before_an_update_is_trained(self, world: World, client: ShardClient) -> None:
        submit(world, client, 0, 2, 4)
        flush(client)

        assert client.updates.subtasks() == {0}
        assert settle(client).rework == {0}
        assert client.updates.counts()["discarded"] == 1

    def test_work_of_another_worker_is_not_repeated(
        self, world: World, client: ShardClient
    ) -> None:
        world.push(0, 0, 4)

        submit(world, client, 0, 0, 2)
        flush(client)

        assert settle(client).rework == frozenset()
        assert counts(client, "discarded", "unapplied") == (1, 0)

    def test_updates_of_a_finished_epoch_are_dropped(
        self, world: World, client: ShardClient
    ) -> None:
        for subtask in range(3):
            world.push(subtask, 0, 4)
        world.shard().turn()

        submit(world, client, 1, 0, 4)
        flush(client)

        assert settle(client).rework == frozenset()
        assert client.updates.counts()["unapplied"] == 0

    def test_updates_under_a_lost_lease_are_dropped(
        self, world: World, client: ShardClient
    ) -> None:
        world.sender.begin(0, 0, 4, token=2)

        submit(world, client, 0, 0, 2, token=1)
        flush(client)

        assert settle(client).rework == frozenset()
        assert counts(client, "discarded", "unapplied") == (1, 0)
        assert world.reader.waiting() == 0

    def test_a_forgotten_subtask_is_neither_pushed_nor_repeated(
        self, world: World, client: ShardClient
    ) -> None:
        world.lose_tensors()
        submit(world, client, 0, 0, 2)
        submit(world, client, 1, 0, 2)

        client.updates.forget(0)

        assert client.updates.subtasks() == {1}
        world.install()
        flush(client)
        assert [Header.parse(each.header).subtask for each in world.reader.read(9)] == [1]


class TestWatching:
    def test_what_others_pushed_is_watched(self, world: World, client: ShardClient) -> None:
        world.push(0, 0, 4)
        client.updates.watch(0, 0, 4)
        client.updates.watch(0, 0, 4)
        assert client.updates.unapplied == 0, "it takes no room"
        assert settle(client).rework == frozenset()
        assert client.updates.subtasks() == {0}

        world.shard().turn()

        assert settle(client).rework == frozenset()
        assert client.updates.subtasks() == frozenset()

    def test_a_watched_subtask_that_was_lost_is_trained(
        self, world: World, client: ShardClient
    ) -> None:
        shard = world.shard()
        shard.turn()
        world.push(0, 0, 4)
        client.updates.watch(0, 0, 4)
        world.lose_tensors()
        shard.turn()

        assert settle(client).rework == {0}
        assert client.updates.subtasks() == frozenset()
