"""A worker's clients for two shards on two servers, with real parameter servers' shards."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import RedisServer
from support.world import World

from vcasgd.errors import Fenced, SnapshotMissing, StoreUnavailable
from vcasgd.learning.shards import Cut
from vcasgd.parameter_server.shard import Shard
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.leases import Lease
from vcasgd.store.tensors.snapshot import Meta, Record
from vcasgd.store.tensors.snapshot_store import SnapshotStore
from vcasgd.store.tensors.updates import Header, checksum
from vcasgd.worker.pending_updates import MAX_UNAPPLIED
from vcasgd.worker.shard_group import LATE_SECONDS, ShardGroup

Eventually = Callable[..., Any]


class Two:
    """One job in two shards."""

    def __init__(self, ledger: RedisServer, nodes: list[RedisServer], storage: Path) -> None:
        self.servers = nodes
        self.nodes = [node.client() for node in nodes]
        self.world = World(ledger.connection, self.nodes[0], storage, running=False)
        layout = self.world.layout
        self.cut = Cut(layout.floats, layout.parameters, 2)
        lease = self.world.leases("first").acquire()
        assert isinstance(lease, Lease)
        facts = {**self.world.facts().to_dict(), "shards": 2}
        assert self.world.leases("first").report_facts(lease, facts)
        for shard in range(2):
            self.install(shard)
        self.group = self.group_with(patience=10)
        self._named = itertools.count(1)

    def group_with(self, patience: float) -> ShardGroup:
        group = ShardGroup(self.nodes, self.world.job, patience)
        group.open(self.cut)
        return group

    def snapshots(self, shard: int) -> SnapshotStore:
        return SnapshotStore(self.nodes[shard], TensorKeys(self.world.job, shard))

    def install(self, shard: int) -> None:
        part, digest = self.cut.parts[shard], self.world.layout.digest()
        meta = Meta(0, 0, part.floats, part.parameters, digest, "AAAAAAAAAAA=" * (shard == 0))
        assert self.snapshots(shard).install(0, meta, Record(), torch.zeros(part.floats))

    def shard(self, number: int, token: int = 1) -> Shard:
        """Return a parameter server's shard."""
        world = self.world
        return Shard(world.jobs.get(world.job), token, tensors=self.nodes[number],
                     ledger=world.ledger, checkpoints=world.checkpoints, number=number)  # fmt: skip

    def submit(self, shards: tuple[int, ...], subtask: int, start: int, stop: int) -> None:
        """Submit the update of an honest worker."""
        whole, name = self.world.delta(subtask, start, stop), f"u{next(self._named)}"
        for shard in shards:
            payload = self.world.codec.encode(self.cut.parts[shard].of(whole))
            header = Header(
                update=name, worker="w", shard=shard, subtask=subtask, start=start, stop=stop,
                base=0, token=1, codec="float32", size=len(payload), checksum=checksum(payload),
                layout=self.world.layout.digest(), loss_sum=1.0,
            )  # fmt: skip
            self.group[shard].submit(header, 0, payload)

    def close(self) -> None:
        self.group.close()
        for node in self.nodes:
            node.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    ledger = RedisServer(tmp_path / "ledger", durable=False)
    nodes = [RedisServer(tmp_path / f"tensors-{node}", durable=False) for node in range(2)]
    stage = Two(ledger, nodes, tmp_path / "storage")
    try:
        yield stage
    finally:
        stage.close()
        for server in (*nodes, ledger):
            server.end()


def flush(two: Two) -> None:
    assert two.group.flush(10), "not everything came into the streams"


class TestBegin:
    def test_each_shard_has_its_own_position(self, two: Two) -> None:
        two.submit((0, 1), 0, 0, 1)
        two.submit((1,), 0, 1, 3)
        flush(two)

        assert two.group.begin(0, 0, 4, 1) == [1, 3]

    def test_pending_updates_are_not_trained_again(self, two: Two) -> None:
        two.servers[1].kill()
        two.submit((0, 1), 0, 0, 2)
        two.group[0].flush(10)

        assert two.group.begin(0, 0, 4, 1) == [2, 2]

    def test_a_silent_shard_is_assumed_to_be_at_the_last_position(self, two: Two) -> None:
        two.submit((0,), 0, 0, 3)
        two.group[0].flush(10)
        two.servers[1].kill()

        assert two.group.begin(0, 0, 4, 1) == [3, 3]

    def test_no_position_is_known_if_no_shard_answers(self, two: Two) -> None:
        for server in two.servers:
            server.kill()

        with pytest.raises(StoreUnavailable):
            two.group.begin(0, 0, 4, 1)

    def test_a_newer_lease_in_any_shard_ends_the_older_one(self, two: Two) -> None:
        two.group[1].begin(0, 0, 4, 2).result()

        with pytest.raises(Fenced):
            two.group.begin(0, 0, 4, 1)


class TestBase:
    def test_contains_all_shards(self, two: Two) -> None:
        two.submit((0, 1), 0, 0, 4)
        flush(two)
        for shard in range(2):
            two.shard(shard).turn()

        two.group.refresh(again=False)

        assert torch.equal(two.group.base, two.world.delta(0, 0, 4))
        assert two.group.base_integers.tolist() == [0]
        assert [two.group[shard].base for shard in range(2)] == [(1, 1), (1, 1)]

    def test_only_newer_shards_are_fetched(self, two: Two) -> None:
        two.group.refresh(again=False)
        two.submit((1,), 0, 0, 4)
        flush(two)
        two.shard(1).turn()
        two.group.base.fill_(7.0)

        two.group.refresh(again=False)

        first, second = (part.of(two.group.base).tolist() for part in two.cut.parts)
        assert set(first) == {7.0}
        assert set(second) <= {0.0, 1.0}

    def test_a_silent_shard_keeps_its_part(self, two: Two) -> None:
        two.group.refresh(again=False)
        two.submit((0,), 0, 0, 4)
        flush(two)
        two.shard(0).turn()
        two.servers[1].kill()

        two.group.refresh(again=False)

        assert [two.group[shard].base for shard in range(2)] == [(1, 1), (0, 0)]

    def test_waits_for_a_shard_without_a_part(self, two: Two) -> None:
        two.servers[1].kill()
        with pytest.raises(StoreUnavailable):
            two.group.refresh(again=False)

        two.servers[1].start()
        with pytest.raises(SnapshotMissing):
            two.group.refresh(again=False)

        two.install(1)
        two.group.refresh(again=False)
        assert two.group[1].base == (0, 0)

    def test_a_prefetched_base_is_used_in_the_next_interval(
        self, two: Two, eventually: Eventually
    ) -> None:
        two.group.refresh(again=False)
        two.submit((0, 1), 0, 0, 4)
        flush(two)
        for shard in range(2):
            two.shard(shard).turn()

        two.group.prefetch(0.0)
        eventually(lambda: all(two.group[shard].has_fetched for shard in range(2)))
        assert not two.group.base.any(), "an interval is trained from the old base"
        two.group.refresh(again=False)

        assert torch.equal(two.group.base, two.world.delta(0, 0, 4))

    def test_an_interval_that_ends_early_does_not_wait_for_the_planned_time(self, two: Two) -> None:
        two.group.refresh(again=False)
        two.group.prefetch(300.0)
        two.submit((0, 1), 0, 0, 4)
        flush(two)
        for shard in range(2):
            two.shard(shard).turn()

        two.group.refresh(again=False)

        assert torch.equal(two.group.base, two.world.delta(0, 0, 4))

    def test_a_prefetched_base_is_fetched_again_after_a_wait(
        self, two: Two, eventually: Eventually
    ) -> None:
        two.submit((0, 1), 0, 0, 2)
        flush(two)
        shards = [two.shard(shard) for shard in range(2)]
        for shard in shards:
            shard.turn()
        two.group.prefetch(0.0)
        eventually(lambda: all(two.group[shard].has_fetched for shard in range(2)))
        two.submit((0, 1), 0, 2, 4)
        flush(two)
        for shard in shards:
            shard.turn()

        two.group.refresh(again=True)

        assert torch.equal(two.group.base, two.world.delta(0, 0, 4))


class TestSlow:
    def test_a_late_node_delays_only_one_wait(self, two: Two) -> None:
        two.group.refresh(again=False)
        two.servers[1].process.freeze()
        started = time.monotonic()
        two.group.settle()
        assert time.monotonic() - started >= LATE_SECONDS
        assert two.group[1].late

        two.group.refresh(again=False)
        assert two.group.begin(0, 0, 4, 1) == [0, 0]
        assert two.group[1].late, "it got another request"

        two.servers[1].process.thaw()
        two.group[1].settle().result(10)
        assert not two.group[1].late


class TestRoom:
    def test_there_is_room_for_two(self, two: Two) -> None:
        assert MAX_UNAPPLIED == 2
        two.submit((0, 1), 0, 0, 1)

        assert not list(two.group.wait_for_room((0, 1)))

    def test_only_the_shards_of_the_interval_count(self, two: Two) -> None:
        for start in range(2):
            two.submit((0,), 0, start, start + 1)

        assert not list(two.group.wait_for_room((1,)))

    def test_waits_until_something_is_applied_in_each(self, two: Two) -> None:
        for start in range(2):
            two.submit((0, 1), 0, start, start + 1)
        flush(two)
        shards = iter([two.shard(0), two.shard(1)])

        for _ in two.group.wait_for_room((0, 1)):
            if shard := next(shards, None):
                shard.turn()

        assert [two.group[shard].unapplied for shard in range(2)] == [0, 0]

    def test_gives_up_if_nothing_is_applied(self, two: Two) -> None:
        two.group.close()
        two.group = two.group_with(patience=0.1)
        for start in range(2):
            two.submit((0, 1), 0, start, start + 1)
        flush(two)

        with pytest.raises(StoreUnavailable, match="applies no updates"):
            list(two.group.wait_for_room((0, 1)))

        assert two.group[1].unapplied == 2, "they are still kept"

    def test_the_caller_can_end_the_wait(self, two: Two) -> None:
        for start in range(2):
            two.submit((0, 1), 0, start, start + 1)
        flush(two)

        for rounds, _ in enumerate(two.group.wait_for_room((0, 1)), start=1):
            if rounds == 3:
                break

        assert two.group[0].unapplied == 2

    def test_does_not_wait_for_a_shard_without_a_model(self, two: Two) -> None:
        """A worker has to make the first snapshot again, and it may be this one."""
        for start in range(2):
            two.submit((1,), 0, start, start + 1)
        flush(two)
        two.nodes[1].flushall()

        with pytest.raises(SnapshotMissing):
            list(two.group.wait_for_room((0, 1)))

        assert two.group.missing


class TestSettled:
    def test_a_loss_in_any_shard_is_reported_once(self, two: Two) -> None:
        two.submit((1,), 0, 2, 4)
        flush(two)

        assert two.group.subtasks() == {0}
        assert two.group.settle().rework == {0}
        assert two.group.settle().rework == frozenset()

    def test_counts_are_of_whole_updates(self, two: Two) -> None:
        two.group.refresh(again=False)
        two.submit((0, 1), 0, 0, 4)
        flush(two)

        counts = two.group.counts()
        assert (counts["version"], counts["pushes"], counts["unapplied"]) == (0, 1, 1)
        assert counts["pushed_bytes"] == counts["fetched_bytes"] == 4 * two.cut.floats

    def test_fetched_bytes_include_prefetches_and_what_others_fetch(self, two: Two) -> None:
        two.group.refresh(again=False)
        two.submit((1,), 0, 0, 4)
        flush(two)
        two.shard(1).turn()

        two.group.prefetch(0.0)
        two.group.refresh(again=False)
        two.snapshots(0).fetch(two.cut.parts[0].of(torch.empty(two.cut.floats)))

        first, second = (4 * part.floats for part in two.cut.parts)
        assert two.group.counts()["fetched_bytes"] == 2 * first + 2 * second
