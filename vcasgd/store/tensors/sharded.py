"""A job's model over all of its store nodes: the snapshots of its shards, put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from vcasgd.errors import SnapshotMissing, StoreUnavailable
from vcasgd.learning.shards import Cut, ShardRange
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.snapshot import Snapshot
from vcasgd.store.tensors.snapshots import Snapshots

#: one snapshot of each shard, in order; each is exact for its own shard
Whole = tuple[Snapshot, ...]


def versions_of(whole: Iterable[Snapshot]) -> tuple[int, ...]:
    return tuple(snapshot.meta.version for snapshot in whole)


def check_nodes(nodes: Sequence[RedisClient], shards: int, job: str) -> None:
    """Raises :class:`StoreUnavailable` where a part of the model is on a node that is not named."""
    if len(nodes) < shards:
        raise StoreUnavailable(
            f"the model of {job} is on {shards} store nodes, and VCASGD_TENSORS_URL names "
            f"{len(nodes)}",
            remedy="name all of them, in the order in which they were when the job began",
        )


def forget(nodes: Iterable[RedisClient], job: str) -> None:
    """Removes everything that a job has on any node."""
    for shard, node in enumerate(nodes):
        Snapshots(node, TensorKeys(job, shard)).forget()


@dataclass(frozen=True)
class Kept:
    """``whole``: what is kept in every shard, by name; ``names``: what is kept in any."""

    whole: dict[str, Whole]
    names: frozenset[str]


class ShardedSnapshots:
    """Reads as :class:`~vcasgd.store.tensors.snapshots.Snapshots` does, with its errors."""

    def __init__(self, nodes: Sequence[RedisClient], job: str, cut: Cut) -> None:
        """Raises as :func:`check_nodes`."""
        check_nodes(nodes, cut.shards, job)
        self._cut = cut
        self.shards = [
            Snapshots(nodes[part.shard], TensorKeys(job, part.shard)) for part in cut.parts
        ]

    def want_pin(self, name: str) -> None:
        """Asks each parameter server to keep its present snapshot, unless it has one already."""
        for shard in self.shards:
            shard.want_pin(name)

    def unpin(self, name: str) -> None:
        for shard in self.shards:
            shard.unpin(name)

    def pinned(self, name: str) -> Whole | None:
        """What is kept under a name; None where a shard keeps nothing under it."""
        return self.pins().whole.get(name)

    def pins(self) -> Kept:
        found = [shard.pins() for shard in self.shards]
        names = frozenset(name for pins in found for name in pins)
        complete = [name for name in names if all(name in pins for pins in found)]
        return Kept({name: tuple(pins[name] for pins in found) for name in complete}, names)

    def fetch_pinned(self, name: str) -> tuple[Whole, Tensor]:
        """The snapshots that are kept under a name and their vector, float32 [floats].

        All nodes are read at the same time. Raises :class:`SnapshotMissing`.
        """
        out = torch.empty(self._cut.floats)

        def fetch(part: ShardRange) -> Snapshot:
            return self.shards[part.shard].fetch_pinned(name, part.of(out))[0]

        with ThreadPoolExecutor(max_workers=len(self.shards)) as pool:
            return tuple(pool.map(fetch, self._cut.parts)), out

    def fetch_states(self, whole: Whole) -> Tensor | None:
        """What the update rules remember in versions that are pinned, float32 [floats]; None
        where they need nothing. Raises :class:`SnapshotMissing`."""
        if not any(snapshot.meta.rule_state for snapshot in whole):
            return None
        # a shard whose rule has nothing to remember yet has zeros
        out = torch.zeros(self._cut.floats)
        for part, snapshot in zip(self._cut.parts, whole, strict=True):
            state = self.shards[part.shard].fetch_state(snapshot.meta)
            if state is not None:
                part.of(out).copy_(state)
        return out

    def still_there(self, name: str, versions: tuple[int, ...]) -> bool:
        """Whether these versions are kept or present; a present one gets its pin back.

        A shard without any snapshot counts: its parameter server is about to bring it back.
        """
        return all(
            _still_there(shard, name, version)
            for shard, version in zip(self.shards, versions, strict=True)
        )


def _still_there(shard: Snapshots, name: str, version: int) -> bool:
    kept = shard.pinned(name)
    if kept is not None and kept.meta.version == version:
        return True
    try:
        present = shard.version()
    except SnapshotMissing:
        return True
    if present == version:
        shard.want_pin(name)
    return present == version
