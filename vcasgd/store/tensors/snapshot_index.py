"""Descriptions of a shard's snapshots, and the names under which they are kept, without tensors.

Processes that don't compute with models need no more, and don't import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice

from vcasgd.errors import JobUnreadable, SnapshotMissing
from vcasgd.limits import MAX_PIN_REQUESTS
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
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

    def taken_over(self) -> bool:
        """Return True if a parameter server has taken over this shard."""
        return bool(self._tensors.exists(self._keys.fence))

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

    def delete_all(self) -> int:
        """Delete all keys of this shard, and return their number."""
        return self._unlink(self._scan(""))

    def _scan(self, start: str) -> Iterator[bytes]:
        """Yield all keys of this shard whose names begin with ``start``."""
        pattern = f"{escaped(self._keys.prefix)}{start}*"
        yield from self._tensors.scan_iter(match=pattern, count=SCANNED)

    def _unlink(self, keys: Iterable[bytes]) -> int:
        names, count = iter(keys), 0
        while batch := list(islice(names, SCANNED)):
            count += self._tensors.unlink(*batch)
        return count


def escaped(prefix: str) -> str:
    """Return a pattern that matches a prefix literally."""
    return prefix.replace("[", r"\[").replace("]", r"\]").replace("*", r"\*")
