"""The memory of a worker's vectors: what shares it, and what never shares it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers import Fault, Moment
from support.shard_pair import ShardPair, flush, pair_of

from vcasgd.errors import StoreUnavailable
from vcasgd.parameter_server.shard import Shard
from vcasgd.worker import shard_client
from vcasgd.worker.shard_group import LATE_SECONDS

Eventually = Callable[..., Any]


def train(pair: ShardPair, start: int) -> torch.Tensor:
    """Make an update in the group's memory; return it."""
    shards = tuple(range(len(pair.nodes)))
    update = pair.group.update_memory(shards)
    update.copy_(pair.world.delta(0, start, start + 1))
    pair.submit(shards, 0, start, start + 1, update)
    return update


def publish(pair: ShardPair, *servers: Shard) -> None:
    flush(pair)
    for server in servers:
        server.turn()
    pair.group.settle()


def has_newest_base(pair: ShardPair) -> bool:
    pair.group.refresh(again=True)
    return torch.equal(pair.group.base, pair.published())


def all_fetched(pair: ShardPair, shards: list[int]) -> bool:
    return all(pair.group[shard].has_fetched for shard in shards)


def values(pair: ShardPair, shard: int) -> set[float]:
    return set(pair.cut.parts[shard].of(pair.group.base).tolist())


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("max_unapplied", [1, 2])
def test_a_worker_has_as_many_vectors_as_unapplied_updates(
    tmp_path: Path, eventually: Eventually, max_unapplied: int, shards: int
) -> None:
    # Given intervals whose updates are applied during or after the next one, by some nodes or all
    with pair_of(tmp_path, shards, max_unapplied=max_unapplied, samples=3000) as pair:
        group, every = pair.group, range(shards)
        servers = [pair.shard(shard) for shard in every]
        addresses, prefetched, kept = set(), 0, 0
        for start in range(24):
            for _ in group.wait_for_room(every):
                for server in servers:
                    server.turn()
            # On a busy machine, a node may answer late, and then keeps its part of the base.
            eventually(partial(has_newest_base, pair))
            # Sometimes one node, sometimes all.
            applied = [shard for shard in every if start % (3 + shard)]
            meanwhile = [shard for shard in applied if group[shard].updates.unapplied]
            publish(pair, *(servers[shard] for shard in meanwhile))
            if start & 2:
                group.prefetch(0.0)
                if max_unapplied > 1:
                    eventually(partial(all_fetched, pair, meanwhile))
                    prefetched += len(meanwhile)
            update = train(pair, start)
            kept += len(group._kept)
            addresses |= {update.data_ptr(), group.base.data_ptr()} - {0}
            del update

    # Then they share the memory
    assert len(addresses) == max_unapplied
    assert (prefetched > 0) == (max_unapplied > 1)
    assert (kept > 0) == (max_unapplied > 1 and shards > 1)


def test_a_silent_node_keeps_its_part_although_an_update_took_the_memory(pair: ShardPair) -> None:
    # Given an update that a single node has applied, and the next one
    pair.group.refresh(again=False)
    train(pair, 0)
    publish(pair, pair.shard(0))
    pair.group.base.fill_(5.0)
    base = pair.group.base.data_ptr()
    assert train(pair, 1).data_ptr() == base

    # When that node dies before it is asked
    flush(pair)
    pair.servers[0].kill()
    server = pair.shard(1)
    for _ in pair.group.wait_for_room([1]):
        server.turn()
    pair.group.refresh(again=False)

    # Then the base has its old part
    assert values(pair, 0) == {5.0}
    assert 5.0 not in values(pair, 1)
    assert [pair.group[shard].base for shard in range(2)] == [(0, 0), (2, 1)]


def test_a_late_answer_never_changes_the_base_of_an_interval(
    pair: ShardPair, eventually: Eventually
) -> None:
    # Given a node that answers after the worker has stopped waiting for it
    pair.group.refresh(again=False)
    pair.publish(0, 0, 4)
    pair.servers[1].process.freeze()
    pair.group.refresh(again=True)
    assert pair.group[1].late
    trained_from = pair.group.base.clone()

    pair.servers[1].process.thaw()
    eventually(lambda: pair.group[1].has_fetched)

    # Then the interval's base stays as it is, and the next one is complete
    assert torch.equal(pair.group.base, trained_from)
    assert [pair.group[shard].base for shard in range(2)] == [(1, 1), (0, 0)]
    pair.group.refresh(again=False)
    assert torch.equal(pair.group.base, pair.published())


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are read by themselves, as large ones are, and don't come with the status."""
    monkeypatch.setattr(shard_client, "SMALL_SNAPSHOT", 0)


@pytest.mark.usefixtures("large")
def test_no_interval_starts_from_a_base_that_is_half_overwritten(tmp_path: Path) -> None:
    # Given a fetch into the base whose connection is cut in the middle
    cut = CutReads(at=0)
    with pair_of(tmp_path, faults={1: cut}) as pair:
        pair.group.refresh(again=False)
        pair.publish(0, 0, 4)
        cut.arm()
        with pytest.raises(StoreUnavailable):
            pair.group.refresh(again=True)
        assert cut.fired
        assert pair.group[1].lacks_base

        # Then the worker waits for that node
        cut.disarm()
        pair.group.refresh(again=False)
        assert torch.equal(pair.group.base, pair.published())


@pytest.mark.usefixtures("large")
def test_the_base_of_a_slow_node_is_not_overwritten(tmp_path: Path) -> None:
    """An interval starts without waiting for the node."""
    slow = SlowReads(at=0, armed=True)
    with pair_of(tmp_path, samples=3000, faults={1: slow}) as pair:
        pair.group.refresh(again=False)
        assert slow.fired
        base = pair.group.base.data_ptr()

        # Given an update that fills up both queues
        train(pair, 0)
        assert train(pair, 1).data_ptr() != base

        # and a newer base, for which the worker doesn't wait
        slow.disarm()
        publish(pair, pair.shard(0), pair.shard(1))
        slow.arm()
        began = time.monotonic()
        pair.group.refresh(again=True)
        assert time.monotonic() - began < SlowReads.SECONDS
        assert pair.group[1].base == (0, 0)
        assert slow.fired


def is_read(command: bytes) -> bool:
    """Return True for a read of a snapshot's content."""
    return command.startswith(b"*2\r\n$3\r\nGET\r\n")


@dataclass
class CutReads(Fault):
    """Cuts each read."""

    def triggers(self, moment: Moment, command: bytes) -> bool:
        cuts = self.armed and moment == "after" and is_read(command)
        self.fired |= cuts
        return cuts


@dataclass
class SlowReads(Fault):
    """Delays each read."""

    SECONDS = 2 * LATE_SECONDS + 1.0

    def triggers(self, moment: Moment, command: bytes) -> bool:
        if self.armed and moment == "before" and is_read(command):
            self.fired = True
            time.sleep(self.SECONDS)
        return False
