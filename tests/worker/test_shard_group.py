"""A worker's clients for two shards on two servers, with real parameter servers' shards."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import RedisServer
from support.world import World

from vcasgd.errors import Fenced, SnapshotMissing, StoreUnavailable
from vcasgd.learning.encodings import Float32
from vcasgd.learning.encodings.encoder import step_format
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

#: Updates whose steps are smaller than the model.
COARSE = {"rule": "async-local-sgd", "eta": 1.0, "codec": "int4"}


class ShardPair:
    """One job in two shards, or in as many as there are nodes."""

    def __init__(
        self,
        ledger: RedisServer,
        nodes: list[RedisServer],
        storage: Path,
        most_unapplied: int = MAX_UNAPPLIED,
        **fields: Any,
    ) -> None:
        self.servers, self.most_unapplied = nodes, most_unapplied
        self.nodes = [node.client() for node in nodes]
        self.world = World(ledger.connection, self.nodes[0], storage, running=False, **fields)
        layout = self.world.layout
        self.cut = Cut(layout.floats, layout.parameters, len(nodes))
        lease = self.world.leases("first").acquire()
        assert isinstance(lease, Lease)
        facts = {**self.world.facts().to_dict(), "shards": len(nodes)}
        assert self.world.leases("first").report_facts(lease, facts)
        for shard in range(len(nodes)):
            self.install(shard)
        self.group = self.group_with(patience=10)
        self._named = itertools.count(1)

    def group_with(self, patience: float) -> ShardGroup:
        group = ShardGroup(self.nodes, self.world.job, patience)
        update, layout = self.world.spec.update, self.world.layout
        group.open(self.cut, self.most_unapplied, lambda part: step_format(update, layout, part))
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

    def publish(self, subtask: int, start: int, stop: int) -> None:
        """Push an update, and publish a version with it."""
        shards = tuple(range(len(self.nodes)))
        self.submit(shards, subtask, start, stop)
        flush(self)
        for shard in shards:
            self.shard(shard).turn()
        self.group.settle()

    def submit(
        self,
        shards: tuple[int, ...],
        subtask: int,
        start: int,
        stop: int,
        update: torch.Tensor | None = None,
    ) -> None:
        """Submit the update of an honest worker, which may be in its memory already."""
        whole = self.world.delta(subtask, start, stop) if update is None else update
        name = f"u{next(self._named)}"
        for shard in shards:
            payload = Float32().encode(self.cut.parts[shard].of(whole))
            header = Header(
                update=name, worker="w", shard=shard, subtask=subtask, start=start, stop=stop,
                base=0, token=1, codec="float32", size=len(payload), checksum=checksum(payload),
                layout=self.world.layout.digest(), loss_sum=1.0,
            )  # fmt: skip
            self.group[shard].updates.submit(header, 0, payload)

    def close(self) -> None:
        self.group.close()
        for node in self.nodes:
            node.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[ShardPair]:
    with pair_of(tmp_path) as pair:
        yield pair


@pytest.fixture
def single(tmp_path: Path) -> Iterator[ShardPair]:
    """A job in one shard."""
    with pair_of(tmp_path, shards=1) as single:
        yield single


@contextmanager
def pair_of(tmp_path: Path, shards: int = 2, **fields: Any) -> Iterator[ShardPair]:
    ledger = RedisServer(tmp_path / "ledger", durable=False)
    nodes = [RedisServer(tmp_path / f"tensors-{node}", durable=False) for node in range(shards)]
    pair = ShardPair(ledger, nodes, tmp_path / "storage", **fields)
    try:
        yield pair
    finally:
        pair.close()
        for server in (*nodes, ledger):
            server.end()


def flush(pair: ShardPair) -> None:
    assert pair.group.flush(10), "not everything came into the streams"


class TestBegin:
    def test_each_shard_has_its_own_position(self, pair: ShardPair) -> None:
        pair.submit((0, 1), 0, 0, 1)
        pair.submit((1,), 0, 1, 3)
        flush(pair)

        assert pair.group.begin(0, 0, 4, 1) == [1, 3]

    def test_pending_updates_are_not_trained_again(self, pair: ShardPair) -> None:
        pair.servers[1].kill()
        pair.submit((0, 1), 0, 0, 2)
        pair.group[0].updates.flush(10)

        assert pair.group.begin(0, 0, 4, 1) == [2, 2]

    def test_a_silent_shard_is_assumed_to_be_at_the_last_position(self, pair: ShardPair) -> None:
        pair.submit((0,), 0, 0, 3)
        pair.group[0].updates.flush(10)
        pair.servers[1].kill()

        assert pair.group.begin(0, 0, 4, 1) == [3, 3]

    def test_no_position_is_known_if_no_shard_answers(self, pair: ShardPair) -> None:
        for server in pair.servers:
            server.kill()

        with pytest.raises(StoreUnavailable):
            pair.group.begin(0, 0, 4, 1)

    def test_a_newer_lease_in_any_shard_ends_the_older_one(self, pair: ShardPair) -> None:
        pair.group[1].begin(0, 0, 4, 2).result()

        with pytest.raises(Fenced):
            pair.group.begin(0, 0, 4, 1)


class TestBase:
    def test_contains_all_shards(self, pair: ShardPair) -> None:
        pair.submit((0, 1), 0, 0, 4)
        flush(pair)
        for shard in range(2):
            pair.shard(shard).turn()

        pair.group.refresh(again=False)

        assert torch.equal(pair.group.base, pair.world.delta(0, 0, 4))
        assert pair.group.base_integers.tolist() == [0]
        assert [pair.group[shard].base for shard in range(2)] == [(1, 1), (1, 1)]

    def test_only_newer_shards_are_fetched(self, pair: ShardPair) -> None:
        pair.group.refresh(again=False)
        pair.submit((1,), 0, 0, 4)
        flush(pair)
        pair.shard(1).turn()
        pair.group.base.fill_(7.0)

        pair.group.refresh(again=False)

        first, second = (part.of(pair.group.base).tolist() for part in pair.cut.parts)
        assert set(first) == {7.0}
        assert set(second) <= {0.0, 1.0}

    def test_of_several_shards_is_kept(self, pair: ShardPair) -> None:
        """A silent shard keeps its part."""
        pair.group.refresh(again=False)
        pair.submit((0, 1), 0, 0, 2)

        assert pair.group.update_memory() is not pair.group.base

    def test_is_kept_while_the_next_interval_can_start_from_it(self, single: ShardPair) -> None:
        single.group.refresh(again=False)

        assert single.group.update_memory() is not single.group.base

    def test_is_fetched_again_after_an_update_took_its_memory(self, single: ShardPair) -> None:
        single.group.refresh(again=False)
        single.submit((0,), 0, 0, 2)
        base = single.group.base
        update = single.group.update_memory().fill_(7.0)
        assert update is base
        single.servers[0].kill()

        with pytest.raises(StoreUnavailable):
            single.group.refresh(again=False)
        single.servers[0].start()
        single.install(0)
        single.group.refresh(again=False)

        assert set(single.group.base.tolist()) == {0.0}, "the same version again"
        assert set(update.tolist()) == {7.0}

    def test_ends_when_the_next_one_is_prefetched(
        self, single: ShardPair, eventually: Eventually
    ) -> None:
        single.group.refresh(again=False)
        single.submit((0,), 0, 0, 4)
        flush(single)
        single.shard(0).turn()
        single.group.settle()
        single.group.prefetch(0.0)
        eventually(lambda: all(client.has_fetched for client in single.group))

        base = single.group.base
        assert single.group.update_memory().fill_(7.0) is base
        single.group.refresh(again=False)

        assert torch.equal(single.group.base, single.world.delta(0, 0, 4))

    def test_ends_while_the_next_one_is_fetched(
        self, single: ShardPair, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given a fetch that is under way when an interval ends
        single.group.refresh(again=False)
        single.publish(0, 0, 4)
        client, goes_on = single.group[0], threading.Event()
        fetch = client._snapshots.fetch_rounded

        def slow(*arguments: Any) -> Meta:
            assert goes_on.wait(60)
            return fetch(*arguments)

        monkeypatch.setattr(client._snapshots, "fetch_rounded", slow)
        single.group.prefetch(0.0)
        eventually(lambda: client.is_fetching)

        # Then the update takes the base's memory
        base = single.group.base
        assert single.group.update_memory().fill_(7.0) is base
        goes_on.set()
        single.group.refresh(again=False)
        assert torch.equal(single.group.base, single.world.delta(0, 0, 4))

    def test_is_lost_if_the_fetch_into_its_memory_fails(
        self, single: ShardPair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given a base that is overwritten while nothing needs it
        single.group.refresh(again=False)
        single.publish(0, 0, 4)
        client = single.group[0]

        def half(out: torch.Tensor, *_: Any) -> Meta:
            out[: len(out) // 2].fill_(7.0)
            raise StoreUnavailable("the connection was cut")

        with monkeypatch.context() as failing:
            failing.setattr(client._snapshots, "fetch_rounded", half)
            with pytest.raises(StoreUnavailable):
                single.group.refresh(again=False)
        assert client.lacks_base

        # Then no interval starts from it before it is complete
        single.group.refresh(again=False)
        assert torch.equal(single.group.base, single.world.delta(0, 0, 4))

    @pytest.mark.parametrize("most_unapplied", [1, 2])
    def test_a_worker_has_as_many_vectors_as_unapplied_updates(
        self, tmp_path: Path, eventually: Eventually, most_unapplied: int
    ) -> None:
        # Given intervals whose updates are applied during or after the next one
        with pair_of(tmp_path, shards=1, most_unapplied=most_unapplied, samples=3000) as single:
            group, server = single.group, single.shard(0)
            addresses, prefetched = set(), 0
            for start in range(9):
                for _ in group.wait_for_room([0]):
                    server.turn()
                group.refresh(again=True)
                # The others are applied after the interval.
                applied_meanwhile = start % 3 and group[0].updates.unapplied
                if applied_meanwhile:
                    flush(single)
                    server.turn()
                    group.settle()
                group.prefetch(0.0)
                if applied_meanwhile and most_unapplied > 1:
                    eventually(lambda: group[0].has_fetched)
                    prefetched += 1
                update = group.update_memory()
                update.copy_(single.world.delta(0, start, start + 1))
                addresses |= {update.data_ptr(), group.base.data_ptr()} - {0}
                single.submit((0,), 0, start, start + 1, update)
                del update

        # Then they share the memory
        assert len(addresses) == most_unapplied
        assert (prefetched > 0) == (most_unapplied > 1)

    def test_a_silent_shard_keeps_its_part(self, pair: ShardPair) -> None:
        pair.group.refresh(again=False)
        pair.submit((0,), 0, 0, 4)
        flush(pair)
        pair.shard(0).turn()
        pair.servers[1].kill()

        pair.group.refresh(again=False)

        assert [pair.group[shard].base for shard in range(2)] == [(1, 1), (0, 0)]

    def test_waits_for_a_shard_without_a_part(self, pair: ShardPair) -> None:
        pair.servers[1].kill()
        with pytest.raises(StoreUnavailable):
            pair.group.refresh(again=False)

        pair.servers[1].start()
        with pytest.raises(SnapshotMissing):
            pair.group.refresh(again=False)

        pair.install(1)
        pair.group.refresh(again=False)
        assert pair.group[1].base == (0, 0)

    def test_a_prefetched_base_is_used_in_the_next_interval(
        self, pair: ShardPair, eventually: Eventually
    ) -> None:
        pair.group.refresh(again=False)
        pair.submit((0, 1), 0, 0, 4)
        flush(pair)
        for shard in range(2):
            pair.shard(shard).turn()

        pair.group.prefetch(0.0)
        eventually(lambda: all(pair.group[shard].has_fetched for shard in range(2)))
        assert not pair.group.base.any(), "an interval is trained from the old base"
        pair.group.refresh(again=False)

        assert torch.equal(pair.group.base, pair.world.delta(0, 0, 4))

    def test_an_interval_that_ends_early_does_not_wait_for_the_planned_time(
        self, pair: ShardPair
    ) -> None:
        pair.group.refresh(again=False)
        pair.group.prefetch(300.0)
        pair.submit((0, 1), 0, 0, 4)
        flush(pair)
        for shard in range(2):
            pair.shard(shard).turn()

        pair.group.refresh(again=False)

        assert torch.equal(pair.group.base, pair.world.delta(0, 0, 4))

    def test_a_prefetched_base_is_fetched_again_after_a_wait(
        self, pair: ShardPair, eventually: Eventually
    ) -> None:
        pair.submit((0, 1), 0, 0, 2)
        flush(pair)
        shards = [pair.shard(shard) for shard in range(2)]
        for shard in shards:
            shard.turn()
        pair.group.prefetch(0.0)
        eventually(lambda: all(pair.group[shard].has_fetched for shard in range(2)))
        pair.submit((0, 1), 0, 2, 4)
        flush(pair)
        for shard in shards:
            shard.turn()

        pair.group.refresh(again=True)

        assert torch.equal(pair.group.base, pair.world.delta(0, 0, 4))


class TestSteps:
    """The base is made of the steps of each shard."""

    @pytest.fixture
    def stepped(self, tmp_path: Path) -> Iterator[ShardPair]:
        with pair_of(tmp_path, samples=3000, update=COARSE) as pair:
            yield pair

    def test_the_base_is_kept_for_the_steps_that_follow_it(self, tmp_path: Path) -> None:
        with pair_of(tmp_path, shards=1, update=COARSE) as single:
            single.group.refresh(again=False)
            single.submit((0,), 0, 0, 2)

            assert single.group.update_memory() is not single.group.base

    @staticmethod
    def fetched(pair: ShardPair) -> int:
        return pair.group.counts()["fetched_bytes"] or 0

    @staticmethod
    def published(pair: ShardPair) -> torch.Tensor:
        """Return what a new worker would fetch."""
        out = torch.empty(pair.world.layout.floats)
        for part in pair.cut.parts:
            pair.snapshots(part.shard).fetch_rounded(part.of(out))
        return out

    def test_the_base_follows_with_fewer_bytes(
        self, stepped: ShardPair, eventually: Eventually
    ) -> None:
        shards, whole = [stepped.shard(shard) for shard in range(2)], 4 * 3001
        stepped.group.refresh(again=False)
        assert self.fetched(stepped) == whole
        for start in range(5):
            stepped.submit((0, 1), 0, start, start + 1)
            flush(stepped)
            for shard in shards:
                shard.turn()
            before = self.fetched(stepped)
            if start % 2:
                stepped.group.prefetch(0.0)
                eventually(lambda: all(stepped.group[shard].has_fetched for shard in range(2)))
            # Also on top of what was prefetched.
            stepped.group.refresh(again=start == 3)

            assert 0 < self.fetched(stepped) - before < whole / 6
            assert torch.equal(stepped.group.base, self.published(stepped))

    def test_a_shard_that_was_away_adds_what_it_missed(self, stepped: ShardPair) -> None:
        shards = [stepped.shard(shard) for shard in range(2)]
        stepped.group.refresh(again=False)
        for start in range(3):
            stepped.submit((0, 1), 0, start, start + 1)
            flush(stepped)
            shards[0].turn()
            if start == 1:
                shards[1].turn()
            stepped.group.refresh(again=False)
        shards[1].turn()
        stepped.group.refresh(again=False)

        assert [stepped.group[shard].base for shard in range(2)] == [(3, 1), (3, 1)]
        assert torch.equal(stepped.group.base, self.published(stepped))

    def test_another_server_that_came_back_empty(self, stepped: ShardPair) -> None:
        shards = [stepped.shard(shard) for shard in range(2)]
        stepped.submit((0, 1), 0, 0, 1)
        flush(stepped)
        for shard in shards:
            shard.turn()
        stepped.group.refresh(again=False)
        stepped.servers[1].kill()
        stepped.servers[1].start()

        shards[1].turn()
        stepped.submit((0, 1), 0, 1, 2)
        flush(stepped)
        for shard in (*shards, *shards):
            shard.turn()
        stepped.group.refresh(again=True)

        assert torch.equal(stepped.group.base, self.published(stepped))


class TestSlow:
    def test_a_late_node_delays_only_one_wait(self, pair: ShardPair) -> None:
        pair.group.refresh(again=False)
        pair.servers[1].process.freeze()
        started = time.monotonic()
        pair.group.settle()
        assert time.monotonic() - started >= LATE_SECONDS
        assert pair.group[1].late

        pair.group.refresh(again=False)
        assert pair.group.begin(0, 0, 4, 1) == [0, 0]
        assert pair.group[1].late, "it got another request"

        pair.servers[1].process.thaw()
        pair.group[1].settle().result(10)
        assert not pair.group[1].late


class TestRoom:
    def test_there_is_room_for_two(self, pair: ShardPair) -> None:
        assert MAX_UNAPPLIED == 2
        pair.submit((0, 1), 0, 0, 1)

        assert not list(pair.group.wait_for_room((0, 1)))

    def test_only_the_shards_of_the_interval_count(self, pair: ShardPair) -> None:
        for start in range(2):
            pair.submit((0,), 0, start, start + 1)

        assert not list(pair.group.wait_for_room((1,)))

    def test_waits_until_something_is_applied_in_each(self, pair: ShardPair) -> None:
        for start in range(2):
            pair.submit((0, 1), 0, start, start + 1)
        flush(pair)
        shards = iter([pair.shard(0), pair.shard(1)])

        for _ in pair.group.wait_for_room((0, 1)):
            if shard := next(shards, None):
                shard.turn()

        assert [pair.group[shard].updates.unapplied for shard in range(2)] == [0, 0]

    def test_gives_up_if_nothing_is_applied(self, pair: ShardPair) -> None:
        pair.group.close()
        pair.group = pair.group_with(patience=0.1)
        for start in range(2):
            pair.submit((0, 1), 0, start, start + 1)
        flush(pair)

        with pytest.raises(StoreUnavailable, match="applies no updates"):
            list(pair.group.wait_for_room((0, 1)))

        assert pair.group[1].updates.unapplied == 2, "they are still kept"

    def test_the_caller_can_end_the_wait(self, pair: ShardPair) -> None:
        for start in range(2):
            pair.submit((0, 1), 0, start, start + 1)
        flush(pair)

        for rounds, _ in enumerate(pair.group.wait_for_room((0, 1)), start=1):
            if rounds == 3:
                break

        assert pair.group[0].updates.unapplied == 2

    def test_does_not_wait_for_a_shard_without_a_model(self, pair: ShardPair) -> None:
        """A worker has to make the first snapshot again, and it may be this one."""
        for start in range(2):
            pair.submit((1,), 0, start, start + 1)
        flush(pair)
        pair.nodes[1].flushall()

        with pytest.raises(SnapshotMissing):
            list(pair.group.wait_for_room((0, 1)))

        assert pair.group.missing


class TestSettled:
    def test_a_loss_in_any_shard_is_reported_once(self, pair: ShardPair) -> None:
        pair.submit((1,), 0, 2, 4)
        flush(pair)

        assert pair.group.subtasks() == {0}
        assert pair.group.settle().rework == {0}
        assert pair.group.settle().rework == frozenset()

    def test_counts_are_of_whole_updates(self, pair: ShardPair) -> None:
        pair.group.refresh(again=False)
        pair.submit((0, 1), 0, 0, 4)
        flush(pair)

        counts = pair.group.counts()
        assert (counts["version"], counts["pushes"], counts["unapplied"]) == (0, 1, 1)
        assert counts["pushed_bytes"] == counts["fetched_bytes"] == 4 * pair.cut.floats

    def test_fetched_bytes_include_prefetches_and_what_others_fetch(self, pair: ShardPair) -> None:
        pair.group.refresh(again=False)
        pair.submit((1,), 0, 0, 4)
        flush(pair)
        pair.shard(1).turn()
        # The parameter server of this test reads over the same client.
        before = pair.group.counts()["fetched_bytes"] or 0

        pair.group.prefetch(0.0)
        pair.group.refresh(again=False)
        pair.snapshots(0).fetch(pair.cut.parts[0].of(torch.empty(pair.cut.floats)))

        # The first shard's was fetched by another reader, the second shard's is the prefetched one.
        assert pair.group.counts()["fetched_bytes"] == before + 4 * pair.cut.floats
