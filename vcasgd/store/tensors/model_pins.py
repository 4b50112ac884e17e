"""Pins of a whole model: names under which the snapshots of all its shards are kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vcasgd.errors import SnapshotMissing, StoreUnavailable
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.snapshot import Snapshot
from vcasgd.store.tensors.snapshot_index import SCANNED, SnapshotIndex

#: Start of every key of a job: its name and the number of its shard.
_JOB = re.compile(rb"vcasgd:\{([^:}]+):\d+\}:")
#: Calls that look for jobs at a time.
SCANS = 10

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
        SnapshotIndex(node, TensorKeys(job, shard)).delete_all()


def scan_jobs(node: RedisClient, cursor: int) -> tuple[int, set[str]]:
    """Return jobs with data among the next keys of a tensors server.

    Start with the cursor 0, and continue with the returned one until it is 0 again.
    """
    jobs: set[str] = set()
    for _ in range(SCANS):
        cursor, keys = node.scan(cursor, match="vcasgd:{*", count=SCANNED)
        found = (_JOB.match(key) for key in keys)
        jobs |= {match[1].decode(errors="replace") for match in found if match}
        if not cursor:
            break
    return cursor, jobs


@dataclass(frozen=True)
class PinnedSnapshots:
    """Snapshots pinned in every shard, by name, and the names pinned in any shard."""

    whole: dict[str, ModelSnapshot]
    names: frozenset[str]


class ModelPins:
    """The pins of a model. Methods raise as those of
    :class:`~vcasgd.store.tensors.snapshot_index.SnapshotIndex` do."""

    def __init__(self, nodes: Sequence[RedisClient], job: str, shards: int) -> None:
        """Raise as :func:`check_nodes` does."""
        check_nodes(nodes, shards, job)
        self._indexes = [
            SnapshotIndex(nodes[shard], TensorKeys(job, shard)) for shard in range(shards)
        ]

    def request_pin(self, name: str) -> None:
        """Ask each parameter server to pin its present snapshot, unless the name is in use."""
        for shard in self._indexes:
            shard.request_pin(name)

    def unpin(self, name: str) -> None:
        """Remove a pin, or a request for one, in all shards."""
        for shard in self._indexes:
            shard.unpin(name)

    def pinned(self, name: str) -> ModelSnapshot | None:
        """Return the snapshots pinned under a name; None unless all shards have the pin."""
        return self.pins().whole.get(name)

    def pins(self) -> PinnedSnapshots:
        """Return all pinned snapshots."""
        pins_by_shard = [shard.pins() for shard in self._indexes]
        names = frozenset(name for pins in pins_by_shard for name in pins)
        complete = [name for name in names if all(name in pins for pins in pins_by_shard)]
        whole = {name: tuple(pins[name] for pins in pins_by_shard) for name in complete}
        return PinnedSnapshots(whole, names)

    def still_there(self, name: str, versions: tuple[int, ...]) -> bool:
        """Return True if these versions are pinned or present; request the pin of a present one.

        A shard without any snapshot counts as True: its parameter server is about to restore it.
        """
        return all(
            _still_there(shard, name, version)
            for shard, version in zip(self._indexes, versions, strict=True)
        )


def _still_there(shard: SnapshotIndex, name: str, version: int) -> bool:
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
