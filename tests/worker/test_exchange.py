"""A worker's exchange with two shards on two servers, with real parameter servers' shards."""

from __future__ import annotations

import time

import pytest
import torch
from support.shard_pair import ShardPair, flush
from support.waiting import PATIENCE

from vcasgd.errors import Fenced, SnapshotMissing, StoreUnavailable
from vcasgd.worker.exchange import LATE_SECONDS
from vcasgd.worker.update_queue import MAX_UNAPPLIED


class TestBegin:
    def test_each_shard_has_its_own_position(self, pair: ShardPair) -> None:
        pair.submit((0, 1), 0, 0, 1)
        pair.submit((1,), 0, 1, 3)
        flush(pair)

        assert pair.exchange.begin(0, 0, 4, 1) == [1, 3]

    def test_pending_updates_are_not_trained_again(self, pair: ShardPair) -> None:
        pair.exchange.refresh(again=False)
        pair.servers[1].kill()
        pair.submit((0, 1), 0, 0, 2)
        pair.exchange[0].flush(PATIENCE)

        assert pair.exchange.begin(0, 0, 4, 1) == [2, 2]

    def test_a_silent_shard_is_assumed_to_be_at_the_last_position(self, pair: ShardPair) -> None:
        pair.submit((0,), 0, 0, 3)
        pair.exchange[0].flush(PATIENCE)
        pair.servers[1].kill()

        assert pair.exchange.begin(0, 0, 4, 1) == [3, 3]

    def test_no_position_is_known_if_no_shard_answers(self, pair: ShardPair) -> None:
        for server in pair.servers:
            server.kill()

        with pytest.raises(StoreUnavailable):
            pair.exchange.begin(0, 0, 4, 1)

    def test_a_newer_lease_in_any_shard_ends_the_older_one(self, pair: ShardPair) -> None:
        pair.exchange[1].begin(0, 0, 4, 2).result()

        with pytest.raises(Fenced):
            pair.exchange.begin(0, 0, 4, 1)


class TestSlow:
    @pytest.mark.usefixtures("nodes_can_be_late")
    def test_a_late_node_delays_only_one_wait(self, pair: ShardPair) -> None:
        pair.exchange.refresh(again=False)
        pair.servers[1].process.freeze()
        started = time.monotonic()
        pair.exchange.settle()
        assert time.monotonic() - started >= LATE_SECONDS
        assert pair.exchange[1].late

        pair.exchange.refresh(again=False)
        assert pair.exchange.begin(0, 0, 4, 1) == [0, 0]
        assert pair.exchange[1].late, "it got another request"

        pair.servers[1].process.thaw()
        pair.exchange[1].poll().result(PATIENCE)
        assert not pair.exchange[1].late


def fill(pair: ShardPair, *shards: int) -> None:
    """Push as many updates as there is room for."""
    for start in range(MAX_UNAPPLIED):
        pair.submit(shards, 0, start, start + 1)
    flush(pair)


class TestRoom:
    def test_only_the_shards_of_the_interval_count(self, pair: ShardPair) -> None:
        fill(pair, 0)

        assert not list(pair.exchange.wait_for_room((1,)))

    def test_waits_until_something_is_applied_in_each(self, pair: ShardPair) -> None:
        fill(pair, 0, 1)
        shards = iter([pair.shard(0), pair.shard(1)])

        for _ in pair.exchange.wait_for_room((0, 1)):
            if shard := next(shards, None):
                shard.turn()

        assert [pair.exchange[shard].updates.unapplied for shard in range(2)] == [0, 0]

    def test_gives_up_if_nothing_is_applied(self, pair: ShardPair) -> None:
        pair.exchange.close()
        pair.exchange = pair.exchange_with(patience=0.1)
        fill(pair, 0, 1)

        with pytest.raises(StoreUnavailable, match="applies no updates"):
            list(pair.exchange.wait_for_room((0, 1)))

        assert pair.exchange[1].updates.unapplied == 2, "they are still kept"

    def test_the_caller_can_end_the_wait(self, pair: ShardPair) -> None:
        fill(pair, 0, 1)

        for rounds, _ in enumerate(pair.exchange.wait_for_room((0, 1)), start=1):
            if rounds == 3:
                break

        assert pair.exchange[0].updates.unapplied == 2

    def test_does_not_wait_for_a_shard_without_a_model(self, pair: ShardPair) -> None:
        """A worker has to make the first snapshot again, and it may be this one."""
        fill(pair, 1)
        pair.nodes[1].flushall()

        with pytest.raises(SnapshotMissing):
            list(pair.exchange.wait_for_room((0, 1)))

        assert pair.exchange.missing


class TestSettled:
    def test_a_loss_in_any_shard_is_reported_once(self, pair: ShardPair) -> None:
        pair.submit((1,), 0, 2, 4)
        flush(pair)

        assert pair.exchange.subtasks() == {0}
        assert pair.exchange.settle().rework == {0}
        assert pair.exchange.settle().rework == frozenset()

    def test_counts_are_of_whole_updates(self, pair: ShardPair) -> None:
        pair.exchange.refresh(again=False)
        pair.submit((0, 1), 0, 0, 4)
        flush(pair)

        counts = pair.exchange.counts()
        assert (counts["version"], counts["pushes"], counts["unapplied"]) == (0, 1, 1)
        assert counts["pushed_bytes"] == counts["fetched_bytes"] == 4 * pair.cut.floats

    def test_fetched_bytes_include_prefetches_and_what_others_fetch(self, pair: ShardPair) -> None:
        pair.exchange.refresh(again=False)
        pair.submit((1,), 0, 0, 4)
        flush(pair)
        pair.shard(1).turn()
        # The parameter server of this test reads over the same client.
        before = pair.exchange.counts()["fetched_bytes"] or 0

        pair.exchange.prefetch(0.0)
        pair.exchange.refresh(again=False)
        pair.snapshots(0).fetch(pair.cut.parts[0].of(torch.empty(pair.cut.floats)))

        # The first shard's was fetched by another reader, the second shard's is the prefetched one.
        assert pair.exchange.counts()["fetched_bytes"] == before + 4 * pair.cut.floats
