"""The base of a worker of one shard or two: what it is made of, and the memory of its vectors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from support.servers import Fault, Moment
from support.shard_pair import COARSE, MakePair, ShardPair, flush
from support.waiting import await_truth

from vcasgd.errors import SnapshotMissing, SpecError, StoreUnavailable
from vcasgd.limits import MAX_INTEGERS_BYTES
from vcasgd.parameter_server.shard import Shard
from vcasgd.worker import shard_link
from vcasgd.worker.exchange import LATE_SECONDS
from vcasgd.worker.interval import encoded_counters


def all_fetched(pair: ShardPair) -> bool:
    return all(link.fetched for link in pair.exchange)


def has_newest_base(pair: ShardPair) -> bool:
    pair.exchange.refresh(again=True)
    return torch.equal(pair.exchange.base.floats, pair.published())


def train(pair: ShardPair, start: int) -> torch.Tensor:
    """Push an update in the exchange's memory; return it."""
    shards = tuple(range(len(pair.nodes)))
    pair.exchange.start_interval()
    update = pair.exchange.lend().copy_(pair.world.delta(0, start, start + 1))
    pair.submit(shards, 0, start, start + 1, update)
    return update


def publish(pair: ShardPair, *servers: Shard) -> None:
    flush(pair)
    for server in servers:
        server.turn()
    pair.exchange.settle()


def versions(pair: ShardPair) -> list[tuple[int, int] | None]:
    return [link.version for link in pair.exchange]


class TestBase:
    def test_only_newer_shards_are_fetched(self, pair: ShardPair) -> None:
        pair.exchange.refresh(again=False)
        pair.submit((1,), 0, 0, 4)
        flush(pair)
        pair.shard(1).turn()
        pair.exchange.base.floats.fill_(7.0)

        pair.exchange.refresh(again=False)

        first, second = (part.of(pair.exchange.base.floats).tolist() for part in pair.cut.parts)
        assert set(first) == {7.0}
        assert set(second) <= {0.0, 1.0}

    def test_waits_for_a_shard_without_a_part(self, pair: ShardPair) -> None:
        pair.servers[1].kill()
        with pytest.raises(StoreUnavailable):
            pair.exchange.refresh(again=False)

        pair.servers[1].start()
        with pytest.raises(SnapshotMissing):
            pair.exchange.refresh(again=False)

        pair.install(1)
        pair.exchange.refresh(again=False)
        assert pair.exchange[1].version == (0, 0)

    def test_a_prefetched_base_is_used_in_the_next_interval(self, pair: ShardPair) -> None:
        pair.exchange.refresh(again=False)
        pair.publish(0, 0, 4)

        pair.exchange.prefetch(0.0)
        await_truth(partial(all_fetched, pair))
        assert not pair.exchange.base.floats.any(), "an interval is trained from the old base"
        pair.exchange.refresh(again=False)

        assert torch.equal(pair.exchange.base.floats, pair.world.delta(0, 0, 4))

    def test_an_interval_that_ends_early_does_not_wait_for_the_planned_time(
        self, pair: ShardPair
    ) -> None:
        pair.exchange.refresh(again=False)
        pair.exchange.prefetch(300.0)
        pair.publish(0, 0, 4)

        pair.exchange.refresh(again=False)

        assert torch.equal(pair.exchange.base.floats, pair.world.delta(0, 0, 4))

    def test_a_prefetched_base_is_fetched_again_after_a_wait(self, pair: ShardPair) -> None:
        pair.publish(0, 0, 2)
        pair.exchange.prefetch(0.0)
        await_truth(partial(all_fetched, pair))
        pair.publish(0, 2, 4)

        pair.exchange.refresh(again=True)

        assert torch.equal(pair.exchange.base.floats, pair.world.delta(0, 0, 4))


class TestSteps:
    """The base is made of the steps of each shard."""

    @pytest.fixture
    def stepped(self, make_pair: MakePair) -> Iterator[ShardPair]:
        with make_pair(samples=3000, update=COARSE) as pair:
            yield pair

    @staticmethod
    def fetched(pair: ShardPair) -> int:
        return pair.exchange.counts()["fetched_bytes"] or 0

    def test_the_base_follows_with_fewer_bytes(self, stepped: ShardPair) -> None:
        whole = 4 * 3001
        stepped.exchange.refresh(again=False)
        assert self.fetched(stepped) == whole
        for start in range(5):
            stepped.publish(0, start, start + 1)
            before = self.fetched(stepped)
            if start % 2:
                stepped.exchange.prefetch(0.0)
                await_truth(partial(all_fetched, stepped))
            # Also on top of what was prefetched.
            stepped.exchange.refresh(again=start == 3)

            assert 0 < self.fetched(stepped) - before < whole / 6
            assert torch.equal(stepped.exchange.base.floats, stepped.published())

    def test_another_server_that_came_back_empty(self, stepped: ShardPair) -> None:
        shards = [stepped.shard(shard) for shard in range(2)]
        stepped.submit((0, 1), 0, 0, 1)
        publish(stepped, *shards)
        stepped.exchange.refresh(again=False)
        stepped.servers[1].kill()
        stepped.servers[1].start()

        shards[1].turn()
        stepped.submit((0, 1), 0, 1, 2)
        publish(stepped, *shards, *shards)
        stepped.exchange.refresh(again=True)

        assert torch.equal(stepped.exchange.base.floats, stepped.published())


class TestOwnUpdate:
    def test_an_interval_continues_from_the_update_that_its_base_lacks(
        self, pair: ShardPair
    ) -> None:
        # Given an own update that only one shard has applied
        pair.exchange.refresh(again=False)
        own = pair.world.delta(0, 0, 2)
        pair.exchange.start_interval()
        pair.submit((0, 1), 0, 0, 2, pair.exchange.lend().copy_(own), keep=True)
        flush(pair)
        pair.shard(0).turn()
        pair.exchange.refresh(again=False)
        base = pair.exchange.base.floats.clone()
        assert [link.lacks_last for link in pair.exchange] == [False, True]

        # Then the next interval has it in both shards, and the base doesn't change
        assert torch.equal(pair.exchange.start_interval().floats, own)
        assert torch.equal(pair.exchange.base.floats, base)

        # and the one after that isn't more than one update ahead
        assert torch.equal(pair.exchange.start_interval().floats, base)

    def test_its_counters_are_in_the_next_interval_too(self, single: ShardPair) -> None:
        single.exchange.refresh(again=False)
        single.exchange.start_interval()
        own = single.exchange.lend().copy_(single.world.delta(0, 0, 2))
        single.submit((0,), 0, 0, 2, own, counters=torch.tensor([7]), keep=True)
        flush(single)
        assert single.exchange.base.integers.tolist() == [0]

        assert single.exchange.start_interval().integers.tolist() == [7]

    def test_not_from_one_that_is_not_kept(self, single: ShardPair) -> None:
        single.exchange.refresh(again=False)
        train(single, 0)

        assert not single.exchange.start_interval().floats.any()

    def test_not_from_one_that_has_to_be_trained_again(self, single: ShardPair) -> None:
        single.exchange.refresh(again=False)
        single.exchange.start_interval()
        single.submit((0,), 0, 2, 4, single.exchange.lend().fill_(1.0), keep=True)
        flush(single)

        assert single.exchange.settle().rework == {0}

        assert not single.exchange.start_interval().floats.any()


class TestMemory:
    @pytest.mark.parametrize("shards", [1, 2])
    @pytest.mark.parametrize("max_unapplied", [1, 2])
    def test_a_worker_has_one_vector_more_than_unapplied_updates(
        self, make_pair: MakePair, max_unapplied: int, shards: int
    ) -> None:
        # Given intervals whose updates are applied during or after the next one
        with make_pair(shards, max_unapplied=max_unapplied, samples=3000) as pair:
            exchange, every = pair.exchange, range(shards)
            servers = [pair.shard(shard) for shard in every]
            addresses, prefetched = set(), 0
            for start in range(12):
                if any(link.updates.full for link in exchange):
                    publish(pair, *servers)
                # On a busy machine, a node may answer late, and then keeps its part of the base.
                await_truth(partial(has_newest_base, pair))
                pending = max(link.updates.unapplied for link in exchange)
                publish(pair, *(servers if start % 3 else []))
                if start & 2 and start % 3 and pending:
                    exchange.prefetch(0.0)
                    await_truth(partial(all_fetched, pair))
                    prefetched += 1
                addresses |= {train(pair, start).data_ptr(), exchange.base.floats.data_ptr()}

        # Then they share the memory
        assert len(addresses) == max_unapplied + 1
        assert (prefetched > 0) == (max_unapplied > 1)

    def test_a_silent_node_keeps_its_part_of_the_base(self, pair: ShardPair) -> None:
        # Given a node that dies while an update that takes memory is under way
        pair.exchange.refresh(again=False)
        pair.exchange.base.floats.fill_(5.0)
        train(pair, 0)
        flush(pair)
        pair.servers[0].kill()
        pair.shard(1).turn()

        pair.exchange.refresh(again=False)

        parts = [set(part.of(pair.exchange.base.floats).tolist()) for part in pair.cut.parts]
        assert parts[0] == {5.0}
        assert 5.0 not in parts[1]
        assert versions(pair) == [(0, 0), (1, 1)]

    @pytest.mark.usefixtures("nodes_can_be_late")
    def test_a_late_answer_never_changes_the_base_of_an_interval(self, pair: ShardPair) -> None:
        # Given a node that answers after the worker has stopped waiting for it
        pair.exchange.refresh(again=False)
        pair.publish(0, 0, 4)
        pair.servers[1].process.freeze()
        pair.exchange.refresh(again=True)
        assert pair.exchange[1].late
        trained_from = pair.exchange.base.floats.clone()

        pair.servers[1].process.thaw()
        await_truth(lambda: not pair.exchange[1].late)

        # Then the interval's base stays as it is, and the next one is complete
        assert torch.equal(pair.exchange.base.floats, trained_from)
        assert versions(pair) == [(1, 1), (0, 0)]
        pair.exchange.refresh(again=False)
        assert torch.equal(pair.exchange.base.floats, pair.published())

    def test_a_fetch_that_is_cut_leaves_the_base_as_it_is(
        self, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given a model that is read by itself, as large ones are, from a node that cuts each read
        monkeypatch.setattr(shard_link, "SMALL_SNAPSHOT", 0)
        reads = Reads(at=0)
        with make_pair(faults={1: reads}) as pair:
            pair.exchange.refresh(again=False)
            pair.publish(0, 0, 4)
            reads.cut = True
            pair.exchange.refresh(again=True)
            assert reads.fired
            assert versions(pair) == [(1, 1), (0, 0)]
            assert not pair.cut.parts[1].of(pair.exchange.base.floats).any()

            # Then the next fetch is complete
            reads.cut = False
            pair.exchange.refresh(again=True)
            assert torch.equal(pair.exchange.base.floats, pair.published())

    @pytest.mark.usefixtures("nodes_can_be_late")
    def test_an_interval_does_not_wait_for_a_slow_node(
        self, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shard_link, "SMALL_SNAPSHOT", 0)
        reads = Reads(at=0)
        with make_pair(samples=3000, faults={1: reads}) as pair:
            pair.exchange.refresh(again=False)
            train(pair, 0)
            publish(pair, pair.shard(0), pair.shard(1))

            reads.seconds = 2 * LATE_SECONDS + 1.0
            began = time.monotonic()
            pair.exchange.refresh(again=True)

            assert time.monotonic() - began < reads.seconds
            assert versions(pair) == [(1, 1), (0, 0)]


@dataclass
class Reads(Fault):
    """Delays or cuts each read of a snapshot's content."""

    cut: bool = False
    seconds: float = 0.0

    def triggers(self, moment: Moment, command: bytes) -> bool:
        if not command.startswith(b"*2\r\n$3\r\nGET\r\n"):
            return False
        if moment == "before":
            time.sleep(self.seconds)
        cuts = self.cut and moment == "after"
        self.fired |= cuts
        return cuts


def test_more_changed_numbers_than_a_header_has_are_an_error_of_the_task() -> None:
    most = 49_152
    assert len(encoded_counters(torch.zeros(most, dtype=torch.int64))) == MAX_INTEGERS_BYTES

    with pytest.raises(SpecError, match=r"at most 49,152 \(declare large ones as mean"):
        encoded_counters(torch.zeros(most + 1, dtype=torch.int64))
