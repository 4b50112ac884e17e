"""Descriptions of a shard's snapshots, and the names under which they are kept, without tensors.

Processes that don't compute with models need no more, and don't import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from vcasgd.errors import JobUnreadable, SnapshotMissing, StoreUnavailable
from vcasgd.limits import MAX_PIN_REQUESTS
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import ANY_SHARD, TensorKeys
from vcasgd.store.tensors.snapshot import (
    Meta,
    Snapshot,
    SnapshotView,
    from_pin,
    read_record,
    stored_count,
)

#: The value of ``safe`` if no version is known to be on the replicas.
NOTHING_SAFE = -1
#: Pinned snapshots at a time; each takes the memory of a model.
MAX_PINS = 4
#: Valid name of a pin.
_PIN = re.compile(rb"[A-Za-z0-9_.:-]{1,100}")
#: Keys that one call looks at. Workers choose the length of some names, and a server has all of an
#: answer in memory.
SCANNED = 100
#: Start of every key of a job: its name and the number of its shard.
_JOB = re.compile(rb"vcasgd:\{([^:}]+):\d+\}:")
#: Calls that look at keys at a time: some milliseconds of a server.
SCANS = 10

#: One snapshot of each shard, in order; each is exact for its own shard.
ModelSnapshot = tuple[Snapshot, ...]


class SnapshotIndex:
    """The snapshots of one shard of one job. Methods raise as those of the client do."""

    def __init__(self, tensors: RedisClient, keys: TensorKeys) -> None:
        self._tensors = tensors
        self._keys = keys

    def version(self) -> int:
        """Return the present version. Raises :class:`SnapshotMissing`."""
        version = self._tensors.hget(self._keys.applied, "version")
        if version is None:
            raise SnapshotMissing("the tensors server holds no snapshot of this job")
        return stored_count(version)

    def exists(self) -> bool:
        """Return True if there is a snapshot."""
        return bool(self._tensors.exists(self._keys.meta))

    def read(self) -> Snapshot:
        """Read the snapshot without its parameters. Raises :class:`SnapshotMissing`."""
        with self._tensors.pipeline(transaction=True) as pipe:
            pipe.get(self._keys.meta)
            pipe.hgetall(self._keys.applied)
            meta, applied = pipe.execute()
        if meta is None:
            raise SnapshotMissing("the tensors server holds no snapshot of this job")
        snapshot = Snapshot(Meta.from_json(meta), read_record(applied))
        if stored_count(applied.get(b"version", b"")) != snapshot.meta.version:
            raise JobUnreadable("the stored snapshot and its applied record differ in version")
        return snapshot

    def read_meta(self) -> Meta:
        """Read the description of the snapshot alone. Raises :class:`SnapshotMissing`."""
        meta = self._tensors.get(self._keys.meta)
        if meta is None:
            raise SnapshotMissing("the tensors server holds no snapshot of this job")
        return Meta.from_json(meta)

    def fence(self) -> int:
        """Return the token of the parameter server that may write, 0 if none has taken over."""
        return int(self._tensors.get(self._keys.fence) or 0)

    def view(self) -> SnapshotView:
        """Read the state of the shard in one round trip."""
        with self._tensors.pipeline(transaction=True) as pipe:
            pipe.hmget(self._keys.applied, "version", "token", "safe")
            pipe.hkeys(self._keys.pins)
            # Workers write it, so it can have any number of names of any length.
            pipe.srandmember(self._keys.pin_requests, MAX_PIN_REQUESTS)
            pipe.get(self._keys.fence)
            (version, writer, safe), pins, pin_requests, token = pipe.execute()
        return SnapshotView(
            None if version is None else stored_count(version),
            stored_count(writer or b"0"),
            NOTHING_SAFE if safe in (None, b"-1") else stored_count(safe),
            int(token or 0),
            frozenset(name.decode() for name in pins),
            tuple(sorted(name.decode() for name in pin_requests if _PIN.fullmatch(name))),
        )

    # -- pins: names under which snapshots are kept --------------------------------------------

    def request_pin(self, name: str) -> None:
        """Ask the parameter server to pin the present snapshot under a name."""
        self._tensors.sadd(self._keys.pin_requests, name)

    def pinned(self, name: str) -> Snapshot | None:
        """Return the snapshot pinned under a name, without its parameters, or None."""
        text = self._tensors.hget(self._keys.pins, name)
        return None if text is None else from_pin(text)

    def pins(self) -> dict[str, Snapshot]:
        """Return all pinned snapshots by name, without their parameters."""
        texts = self._tensors.hgetall(self._keys.pins)
        return {name.decode(): from_pin(text) for name, text in texts.items()}

    def unpin(self, name: str) -> None:
        """Remove a pin, or a request; the parameter server deletes the chunks in its next turn."""
        with self._tensors.pipeline(transaction=True) as pipe:
            pipe.srem(self._keys.pin_requests, name)
            pipe.hdel(self._keys.pins, name)
            pipe.execute()

    def still_has(self, name: str, version: int) -> bool:
        """Return True if a version is pinned under a name, or present; then request the pin.

        A shard without any snapshot counts as True: its parameter server is about to restore it.
        """
        pinned = self.pinned(name)
        if pinned is not None and pinned.meta.version == version:
            return True
        try:
            present = self.version()
        except SnapshotMissing:
            return True
        if present == version:
            self.request_pin(name)
        return present == version

    def delete_all(self) -> int:
        """Delete all keys of this shard, or of any, and return their number."""
        return self._unlink(self._scan(""))

    def _scan(self, start: str) -> Iterator[bytes]:
        """Yield all keys of this shard whose names begin with ``start``."""
        pattern = f"{escaped(self._keys.prefix)}{start}*"
        if self._keys.shard == ANY_SHARD:
            pattern = pattern.replace(r":\*}:", ":*}:")
        yield from self._tensors.scan_iter(match=pattern, count=SCANNED)

    def _unlink(self, keys: Iterable[bytes | str]) -> int:
        names, count = iter(keys), 0
        while batch := list(islice(names, SCANNED)):
            count += self._tensors.unlink(*batch)
        return count


def escaped(prefix: str) -> str:
    """Return a pattern that matches a prefix literally."""
    return prefix.replace("[", r"\[").replace("]", r"\]").replace("*", r"\*")


def versions_of(whole: Iterable[Snapshot]) -> tuple[int, ...]:
    return tuple(snapshot.meta.version for snapshot in whole)


def nodes_of(
    nodes: Sequence[RedisClient], used: int, shards: int, job: str
) -> tuple[RedisClient, ...]:
    """Return the node of each shard of a job, which uses so many of the nodes.

    Raises :class:`StoreUnavailable` if one of these is not configured.
    """
    if len(nodes) < used:
        raise StoreUnavailable(
            f"the model of {job} is on {used} store nodes, but VCASGD_TENSORS_URL names "
            f"{len(nodes)}",
            remedy="name all of them, in the same order as when the job started",
        )
    return tuple(nodes[shard * used // shards] for shard in range(shards))


def delete_job(nodes: Iterable[RedisClient], job: str) -> None:
    for node in nodes:
        SnapshotIndex(node, TensorKeys(job, ANY_SHARD)).delete_all()


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
    """The pins of a whole model: names under which the snapshots of all its shards are kept.

    Methods raise as those of :class:`SnapshotIndex` do.
    """

    def __init__(self, nodes: Sequence[RedisClient], job: str, shards: int) -> None:
        """``nodes`` are those of each shard."""
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
        pins_by_shard = [shard.pins() for shard in self._indexes]
        names = frozenset(name for pins in pins_by_shard for name in pins)
        complete = [name for name in names if all(name in pins for pins in pins_by_shard)]
        whole = {name: tuple(pins[name] for pins in pins_by_shard) for name in complete}
        return PinnedSnapshots(whole, names)

    def still_there(self, name: str, versions: tuple[int, ...]) -> bool:
        return all(
            shard.still_has(name, version)
            for shard, version in zip(self._indexes, versions, strict=True)
        )
