"""Snapshots of a whole model, assembled from its shards on all store nodes."""

from __future__ import annotations

import re
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
from vcasgd.store.tensors.snapshot_store import SnapshotStore

#: Keys that one call looks at; a server needs less than a millisecond for them.
SCANNED = 1000
#: Start of every key of a job: its name and the number of its shard.
_JOB = re.compile(r"vcasgd:\{([^:}]+):\d+\}:")

#: One snapshot of each shard, in order; each is exact for its own shard.
ModelSnapshot = tuple[Snapshot, ...]


def versions_of(whole: Iterable[Snapshot]) -> tuple[int, ...]:
    """Return the version of each shard."""
    return tuple(snapshot.meta.version for snapshot in whole)


def check_nodes(nodes: Sequence[RedisClient], shards: int, job: str) -> None:
    """Raise :class:`StoreUnavailable` if a shard is on a node that is not configured."""
    if len(nodes) < shards:
        raise StoreUnavailable(
            f"the model of {job} is on {shards} store nodes, but VCASGD_TENSORS_URL names "
            f"{len(nodes)}",
            remedy="name all of them, in the same order as when the job started",
        )


def delete_job(nodes: Iterable[RedisClient], job: str) -> None:
    """Delete all data of a job on all nodes."""
    for shard, node in enumerate(nodes):
        SnapshotStore(node, TensorKeys(job, shard)).delete_all()


def scan_jobs(node: RedisClient, cursor: int) -> tuple[int, set[str]]:
    """Return jobs with data among the next :data:`SCANNED` keys of a tensors server.

    Start with the cursor 0, and continue with the returned one until it is 0 again.
    """
    cursor, keys = node.scan(cursor, match="vcasgd:{*", count=SCANNED)
    found = (_JOB.match(key.decode(errors="replace")) for key in keys)
    return cursor, {match[1] for match in found if match}


@dataclass(frozen=True)
class PinnedSnapshots:
    """Snapshots pinned in every shard, by name, and the names pinned in any shard."""

    whole: dict[str, ModelSnapshot]
    names: frozenset[str]


class ShardedSnapshots:
    """Reader of a model's shards; raises as
    :class:`~vcasgd.store.tensors.snapshot_store.SnapshotStore` does."""

    def __init__(self, nodes: Sequence[RedisClient], job: str, cut: Cut) -> None:
        """Raise as :func:`check_nodes` does."""
        check_nodes(nodes, cut.shards, job)
        self._cut = cut
        self.shards = [
            SnapshotStore(nodes[part.shard], TensorKeys(job, part.shard)) for part in cut.parts
        ]

    def request_pin(self, name: str) -> None:
        """Ask each parameter server to pin its present snapshot, unless the name is in use."""
        for shard in self.shards:
            shard.request_pin(name)

    def unpin(self, name: str) -> None:
        """Remove a pin, or a request for one, in all shards."""
        for shard in self.shards:
            shard.unpin(name)

    def pinned(self, name: str) -> ModelSnapshot | None:
        """Return the snapshots pinned under a name; None unless all shards have the pin."""
        return self.pins().whole.get(name)

    def pins(self) -> PinnedSnapshots:
        """Return all pinned snapshots."""
        pins_by_shard = [shard.pins() for shard in self.shards]
        names = frozenset(name for pins in pins_by_shard for name in pins)
        complete = [name for name in names if all(name in pins for pins in pins_by_shard)]
        whole = {name: tuple(pins[name] for pins in pins_by_shard) for name in complete}
        return PinnedSnapshots(whole, names)

    def fetch_pinned(self, name: str) -> tuple[ModelSnapshot, Tensor]:
        """Return the snapshots pinned under a name and their vector, float32 [floats].

        Reads all nodes in parallel. Raises :class:`SnapshotMissing`.
        """
        out = torch.empty(self._cut.floats)

        def fetch(part: ShardRange) -> Snapshot:
            return self.shards[part.shard].fetch_pinned(name, part.of(out))[0]

        with ThreadPoolExecutor(max_workers=len(self.shards)) as pool:
            return tuple(pool.map(fetch, self._cut.parts)), out

    def fetch_states(self, whole: ModelSnapshot) -> Tensor | None:
        """Return the rules' states in pinned versions, float32 [floats]; None if they have none.

        Raises :class:`SnapshotMissing`.
        """
        if not any(snapshot.meta.rule_state for snapshot in whole):
            return None
        # The state of a rule that has not applied an update yet is zero.
        out = torch.zeros(self._cut.floats)
        for part, snapshot in zip(self._cut.parts, whole, strict=True):
            state = self.shards[part.shard].fetch_state(snapshot.meta)
            if state is not None:
                part.of(out).copy_(state)
        return out

    def still_there(self, name: str, versions: tuple[int, ...]) -> bool:
        """Return True if these versions are pinned or present; request the pin of a present one.

        A shard without any snapshot counts as True: its parameter server is about to restore it.
        """
        return all(
            _still_there(shard, name, version)
            for shard, version in zip(self.shards, versions, strict=True)
        )


def _still_there(shard: SnapshotStore, name: str, version: int) -> bool:
    pinned = shard.pinned(name)
    if pinned is not None and pinned.meta.version == version:
        return True
    try:
        present = shard.version()
    except SnapshotMissing:
        return True
    if present == version:
        shard.request_pin(name)
    return present == version
