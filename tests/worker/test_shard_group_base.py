"""The base of a worker of one shard or two: what it is made of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.shard_pair import COARSE, ShardPair, flush, pair_of

from vcasgd.errors import SnapshotMissing, StoreUnavailable
from vcasgd.store.tensors.snapshot import Meta

Eventually = Callable[..., Any]


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

    def test_lacks_the_last_update_until_it_is_fetched_with_it(self, pair: ShardPair) -> None:
        pair.group.limit_unapplied(2)
        pair.group.refresh(again=False)
        assert not any(client.lacks_last for client in pair.group)

        pair.submit((0, 1), 0, 0, 2)
        flush(pair)
        assert all(client.lacks_last for client in pair.group)
        pair.shard(0).turn()
        pair.group.refresh(again=False)

        assert [client.lacks_last for client in pair.group] == [False, True]
        pair.shard(1).turn()
        pair.group.settle()
        assert pair.group[1].lacks_last, "it is applied, and not fetched"
        pair.group.refresh(again=True)
        assert not pair.group[1].lacks_last

    def test_of_several_shards_is_kept(self, pair: ShardPair) -> None:
        """A silent shard keeps its part."""
        pair.group.refresh(again=False)
        pair.submit((0, 1), 0, 0, 2)

        assert pair.group.update_memory((0, 1)) is not pair.group.base

    def test_is_kept_while_the_next_interval_can_start_from_it(self, single: ShardPair) -> None:
        single.group.refresh(again=False)

        assert single.group.update_memory((0,)) is not single.group.base

    def test_is_fetched_again_after_an_update_took_its_memory(self, single: ShardPair) -> None:
        single.group.refresh(again=False)
        single.submit((0,), 0, 0, 2)
        base = single.group.base
        update = single.group.update_memory((0,)).fill_(7.0)
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
        assert single.group.update_memory((0,)).fill_(7.0) is base
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
        assert single.group.update_memory((0,)).fill_(7.0) is base
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

            assert single.group.update_memory((0,)) is not single.group.base

    @staticmethod
    def fetched(pair: ShardPair) -> int:
        return pair.group.counts()["fetched_bytes"] or 0

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
            assert torch.equal(stepped.group.base, stepped.published())

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
        assert torch.equal(stepped.group.base, stepped.published())

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

        assert torch.equal(stepped.group.base, stepped.published())
