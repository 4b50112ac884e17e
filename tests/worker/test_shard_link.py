"""A worker's link to a shard, on real servers and with a real parameter server's shard."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.harness import RedisServer
from support.servers import Fault, Moment, through_proxy
from support.shard_links import flush, link_of, settle, submit, version_of
from support.waiting import PATIENCE, await_truth
from support.world import World

from vcasgd.errors import SnapshotMissing
from vcasgd.store.connection import connect
from vcasgd.store.tensors.header import Header
from vcasgd.worker import shard_link as module
from vcasgd.worker.shard_link import ShardLink


@pytest.fixture
def link(world: World) -> Iterator[ShardLink]:
    link = link_of(world)
    try:
        yield link
    finally:
        link.close()


def counts(link: ShardLink, *names: str) -> tuple[int, ...]:
    return tuple(getattr(link.updates, name) for name in names)


class NotedSlots(threading.Semaphore):
    """One slot, and whether the push thread has asked for it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.asked = threading.Event()

    def __enter__(self) -> bool:
        if "push" in threading.current_thread().name:
            self.asked.set()
        return self.acquire()


class TestSending:
    def test_a_large_update_waits_in_the_worker_for_the_one_before(
        self,
        world: World,
        link: ShardLink,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(module, "PIPELINED_BYTES", 0)
        headers = [submit(world, link, 0, start, start + 1) for start in range(3)]
        shard = world.shard()

        for header in headers[:2]:
            await_truth(world.reader.waiting)
            (entry,) = world.reader.read(10)
            assert Header.parse(entry.header).update == header.update
            assert shard.turn() == 1
        await_truth(world.reader.waiting)
        submit(world, link, 0, 3, 4)
        flush(link)

        assert world.reader.waiting() == 2, "a worker that leaves waits for nothing"

    def test_updates_are_pushed_in_the_background_and_in_order(
        self, world: World, link: ShardLink
    ) -> None:
        headers = [submit(world, link, 0, start, start + 1) for start in range(4)]

        flush(link)

        sent = [Header.parse(entry.header) for entry in world.reader.read(10)]
        assert sent == headers
        assert counts(link, "sent", "sent_again", "discarded") == (4, 0, 0)
        assert link.updates.sent_bytes == sum(header.size for header in headers)
        assert link.updates.unapplied == 4
        assert link.updates.subtasks() == {0}

    def test_a_push_waits_for_a_slot_among_the_shards_of_a_node(self, world: World) -> None:
        # Given a node whose other shard has the only slot
        slots = NotedSlots()
        with slots, closing(link_of(world, vector_slots=slots)) as link:
            # When an update is pushed
            submit(world, link, 0, 0, 2)

            # Then it is sent only afterwards
            assert slots.asked.wait(PATIENCE), "it takes no slot"
            assert not world.reader.waiting()
            slots.release()
            flush(link)
            assert world.reader.waiting()
            slots.acquire()


class TestBugs:
    """An unexpected error in a thread reaches the training thread."""

    def test_an_error_of_the_push_thread_is_raised(
        self, world: World, link: ShardLink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link._sender, "push", raising(TypeError("a bug")))
        submit(world, link, 0, 0, 2)

        assert not link.flush(10), "it returns at once"
        with pytest.raises(TypeError, match="a bug"):
            settle(link)

    def test_an_error_of_the_request_thread_is_raised(
        self, link: ShardLink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link._sender, "status", raising(TypeError("a bug")))
        with pytest.raises(TypeError, match="a bug"):
            link.poll().result(PATIENCE)

        monkeypatch.undo()
        assert version_of(link) == (0, 0), "the thread is still running"


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_args: Any) -> Any:
        raise error

    return fail


class TestDenied:
    @pytest.fixture
    def reader(self, world: World, server: RedisServer) -> Iterator[ShardLink]:
        """A link whose pushes are refused."""
        rules = ["on", ">secret", "~*", "&*", "+@all", "-evalsha"]
        world.tensors.execute_command("ACL", "SETUSER", "reader", *rules)
        node = connect(f"redis://reader:secret@127.0.0.1:{server.files.port}/1")
        link = link_of(world, node)
        yield link
        link.close()
        node.close()
        world.tensors.execute_command("ACL", "DELUSER", "reader")

    def test_refused_pushes_are_counted_and_retried_until_they_are_accepted(
        self,
        world: World,
        reader: ShardLink,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        # Given pushes that the server refuses
        began = time.monotonic()
        submit(world, reader, 0, 0, 4)

        # Then they are retried at growing intervals, and named once
        await_truth(lambda: reader.denied >= 3)
        denied = reader.denied
        assert denied <= 6 + 2 * (time.monotonic() - began)
        assert sum("refuses pushes" in each for each in caplog.messages) == 1

        # When the server accepts them
        world.tensors.execute_command("ACL", "SETUSER", "reader", "+evalsha")

        # Then nothing is lost
        flush(reader)
        assert counts(reader, "sent") == (1,)


class TestLost:
    def test_updates_are_pushed_again_to_a_server_that_came_back_empty(
        self, world: World, link: ShardLink
    ) -> None:
        shard = world.shard()
        shard.turn()
        submit(world, link, 0, 0, 2)
        submit(world, link, 0, 2, 4)
        flush(link)
        world.lose_tensors()
        with pytest.raises(SnapshotMissing):
            version_of(link)
        assert link.updates.unapplied == 2, "they are kept"
        shard.turn()

        assert settle(link).rework == frozenset()
        flush(link)
        shard.turn()

        assert settle(link).rework == frozenset()
        assert counts(link, "sent_again", "unapplied") == (2, 0)
        assert world.positions() == {0: 4}
        world.assert_exact()

    def test_waits_for_a_snapshot_to_come_back(self, world: World, link: ShardLink) -> None:
        shard = world.shard()
        shard.turn()
        world.lose_tensors()
        submit(world, link, 0, 0, 4)
        assert not link.flush(0.05), "its time is bounded"
        assert link.updates.unapplied == 1, "it is kept"

        shard.turn()

        flush(link)
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
                link = link_of(world, connection)
                try:
                    fault.arm()
                    submit(world, link, subtask, position, position + 1, token=at)
                    flush(link)
                finally:
                    link.close()
            fired.append(fault.fired)
            assert world.reader.waiting() == 1
            world.shard().turn()
            world.assert_exact()
        assert fired[0]
        assert not fired[-1], "a push has more commands"
        assert world.snapshots.version() == len(fired)
        assert world.rejected() == {}


class TestRefused:
    def test_a_rejected_one_and_those_after_it_are_trained_again(
        self, world: World, link: ShardLink
    ) -> None:
        shard = world.shard()
        submit(world, link, 0, 0, 2, checksum=1)
        submit(world, link, 0, 2, 4)
        flush(link)
        shard.turn()

        settled = settle(link)
        assert (settled.rejected[0], settled.rework) == ((0, "checksum"), {0})
        assert link.updates.unapplied == 0
        assert settle(link).rework == frozenset(), "reported once"
        assert world.sender.begin(0, 0, 4, 1) == 0

        submit(world, link, 0, 0, 4)
        flush(link)
        shard.turn()
        assert settle(link).rework == frozenset()
        assert world.positions() == {0: 4}
        world.assert_exact()

    def test_work_of_another_worker_is_not_repeated(self, world: World, link: ShardLink) -> None:
        world.push(0, 0, 4)

        submit(world, link, 0, 0, 2)
        flush(link)

        assert settle(link).rework == frozenset()
        assert counts(link, "discarded", "unapplied") == (1, 0)

    def test_updates_under_a_lost_lease_are_dropped(self, world: World, link: ShardLink) -> None:
        world.sender.begin(0, 0, 4, token=2)

        submit(world, link, 0, 0, 2, token=1)
        flush(link)

        assert settle(link).rework == frozenset()
        assert counts(link, "discarded", "unapplied") == (1, 0)
        assert world.reader.waiting() == 0


@dataclass
class BeforeReads(Fault):
    """Does something before each of the first reads of a snapshot's content."""

    todo: list[Callable[[], object]] = field(default_factory=list)

    def triggers(self, moment: Moment, command: bytes) -> bool:
        if moment == "before" and b":s:" in command and self.todo:
            self.todo.pop(0)()
        return False


class TestContained:
    """A fetched version has the updates that the link says, whatever happens meanwhile."""

    @pytest.fixture(autouse=True)
    def _as_a_large_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "SMALL_SNAPSHOT", 0)

    @staticmethod
    def assert_has_own(world: World, link: ShardLink) -> None:
        """Fetch what the last poll found, which has the own update."""
        out, base = torch.empty(world.layout.floats), torch.zeros(world.layout.floats)
        link.fetch(out, base).result(PATIENCE)
        link.take()
        assert (out * world.delta(0, 0, 2)).sum() == 2
        assert link.settled == 1

    def test_one_that_is_pushed_and_applied_before_the_answer(
        self, world: World, server: RedisServer
    ) -> None:
        shard = world.started_shard()

        def publish() -> None:
            submit(world, link, 0, 0, 2)
            flush(link)
            shard.turn()

        question = Fault(1, instead=publish)
        with through_proxy(server, 1, question) as node, closing(link_of(world, node)) as link:
            version_of(link)
            question.arm()
            link.poll(newer=True).result(PATIENCE)
            assert question.fired
            self.assert_has_own(world, link)

    def test_one_that_is_applied_while_older_versions_are_read(
        self, world: World, server: RedisServer
    ) -> None:
        shard, others = world.started_shard(), iter(range(4))

        def publish() -> None:
            start = next(others)
            world.apply(shard, 1, start, start + 1)

        def replace() -> None:
            publish()
            publish()

        # Given a version that is replaced by others, which have it, and those by another one
        reads = BeforeReads(0, todo=[replace, publish])
        with through_proxy(server, 1, reads) as node, closing(link_of(world, node)) as link:
            publish()
            submit(world, link, 0, 0, 2)
            flush(link)
            link.poll(newer=True).result(PATIENCE)
            self.assert_has_own(world, link)
            assert not reads.todo
