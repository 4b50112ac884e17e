"""Snapshots in the tensors server: parameters, rule state, version and applied record as one.

A snapshot's chunks are written first, under names that nobody knows yet; one script then
makes them the present snapshot, together with everything that has to change with it. A
reader therefore sees one snapshot or another, and never a mixture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vcasgd.errors import SnapshotMissing, StoreError, StoreUnavailable
from vcasgd.store.bulk import BulkTransfer, Missing, WrongLength
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.bf16_split import chunk_names, outgoing, receive
from vcasgd.store.tensors.snapshot import (
    Change,
    Meta,
    Record,
    Snapshot,
    SnapshotView,
    from_pin,
    pin_text,
    read_record,
    record_fields,
)

#: a reader that the writer overtakes starts again; each time a whole publication went by
READ_ATTEMPTS = 50
#: no version is known to be on the replicas
NOTHING_SAFE = -1
#: pinned snapshots at a time: each costs the memory of a model
MOST_PINS = 4


class Snapshots:
    """The snapshots of one shard of one job."""

    def __init__(self, tensors: RedisClient, keys: TensorKeys) -> None:
        self._tensors = tensors
        self._keys = keys
        self._wire = BulkTransfer(tensors)
        # these are acknowledged to workers, so they wait for the replicas
        acknowledged = tensors.waiting()
        self._takeover = acknowledged.script("tensors/takeover")
        self._install = acknowledged.script("tensors/install")
        self._replace = acknowledged.script("tensors/replace")
        self._commit = acknowledged.script("tensors/commit")
        self._advance = tensors.script("tensors/advance")
        self._pin = tensors.script("tensors/pin")

    # -- reading -------------------------------------------------------------------------------

    def version(self) -> int:
        """Raises :class:`SnapshotMissing`."""
        version = self._tensors.hget(self._keys.applied, "version")
        if version is None:
            raise SnapshotMissing("the tensors server holds no snapshot of this job")
        return int(version)

    def read(self) -> Snapshot:
        """Meta and applied record without the parameters. Raises :class:`SnapshotMissing`."""
        with self._tensors.pipeline(transaction=True) as pipe:
            pipe.get(self._keys.meta)
            pipe.hgetall(self._keys.applied)
            meta, applied = pipe.execute()
        if meta is None:
            raise SnapshotMissing("the tensors server holds no snapshot of this job")
        return Snapshot(Meta.from_json(meta), read_record(applied))

    def fetch(self, out: Tensor, *, rounded: bool = False) -> Snapshot:
        """The present parameters into ``out`` (float32 [floats]), ``rounded`` to what the job's
        encoding keeps where that is less to read.

        Raises :class:`SnapshotMissing`, and :class:`StoreUnavailable` where the writer
        overtook the reader too often.
        """
        for _ in range(READ_ATTEMPTS):
            snapshot = self.read()
            if self._receive(snapshot.meta, out, rounded=rounded):
                return snapshot
        raise StoreUnavailable("the snapshot was replaced faster than it could be read")

    def fetch_pinned(self, name: str, out: Tensor | None = None) -> tuple[Snapshot, Tensor]:
        """The snapshot that is kept under a name. Raises :class:`SnapshotMissing`."""
        pinned = self.pinned(name)
        if pinned is None:
            raise SnapshotMissing(f"no snapshot is kept under the name {name}")
        if out is None:
            out = torch.empty(pinned.meta.floats)
        if not self._receive(pinned.meta, out):
            raise SnapshotMissing(f"the snapshot {name} is no longer complete")
        return pinned, out

    def _receive(self, meta: Meta, out: Tensor, *, rounded: bool = False) -> bool:
        if out.numel() != meta.floats:
            raise StoreError(f"a vector of {out.numel()} can't take a snapshot of {meta.floats}")
        rounded = rounded or not meta.exact
        keys = self._vector_keys(replace(meta, exact=False) if rounded else meta)
        try:
            receive(self._wire, keys, out, halves=meta.halves, rounded=rounded)
        except Missing:
            return False
        except WrongLength as error:
            raise StoreError(f"chunk {error.index} of a snapshot is {error.found}") from error
        return True

    def fetch_state(self, meta: Meta) -> Tensor | None:
        """What the update rule remembers in a version that is present or pinned, float32 [floats];
        None where it needs nothing. Raises :class:`SnapshotMissing`."""
        if not meta.rule_state:
            return None
        out = torch.empty(meta.floats)
        try:
            receive(self._wire, self._state_keys(meta), out, halves=False, rounded=False)
        except Missing as error:
            raise SnapshotMissing("the snapshot is no longer complete") from error
        except WrongLength as error:
            raise StoreError(f"chunk {error.index} of a rule's state is {error.found}") from error
        return out

    # -- writing: the parameter server, or a worker where there is no snapshot yet -------------

    def write(self, meta: Meta, vector: Tensor, state: Tensor | None = None) -> None:
        """Writes the chunks of a version that nobody sees yet; ``state``: of the update rule,
        where ``meta.rule_state`` says that there is one."""
        chunks = outgoing(vector, halves=meta.halves, planes=meta.planes)
        self._wire.store(zip(self._vector_keys(meta), chunks, strict=True))
        if state is not None:
            chunks = outgoing(state, halves=False)
            self._wire.store(zip(self._state_keys(meta), chunks, strict=True))

    def complete(self, meta: Meta, vector: Tensor) -> Meta:
        """Adds the low plane to a version that was written without, and returns its new
        description, which is still to be committed.

        The high plane is written again: its numbers may have been rounded another way.
        """
        if not meta.exact:
            meta = replace(meta, exact=True)
            self.write(meta, vector)
        return meta

    def takeover(self, token: int) -> None:
        """From now on only this token may write. Raises :class:`Fenced`."""
        self._takeover(keys=[self._keys.fence], args=[token])

    def taken_over(self) -> bool:
        """Whether a parameter server writes here, or waits for a first snapshot."""
        return bool(self._tensors.exists(self._keys.fence))

    def install(
        self,
        token: int,
        meta: Meta,
        record: Record,
        vector: Tensor,
        state: Tensor | None = None,
        *,
        stored: bool = True,
    ) -> bool:
        """Makes this the present snapshot where there is none; False where there is one.

        ``stored``: all of it can be had elsewhere, too (nothing was applied yet, or there is
        a checkpoint), so that nobody has to wait until it is on the replicas.
        """
        self.write(meta, vector, state)
        keys = self._keys
        safe = meta.version if stored or not self._tensors.replicated else NOTHING_SAFE
        installed = self._install(
            keys=[keys.fence, keys.meta, keys.applied, keys.pushed, keys.tokens, keys.stream,
                  keys.rejected, keys.places, keys.news, *self.chunk_keys(meta)],
            args=[token, meta.to_json(), *record_fields(meta, record, safe)],
        )  # fmt: skip
        _check_chunks(installed)
        if not installed:
            self._remove_attempt(meta)
        return bool(installed)

    def replace(
        self,
        token: int,
        meta: Meta,
        record: Record,
        vector: Tensor,
        state: Tensor | None = None,
        *,
        first_open: int,
    ) -> bool:
        """Puts this over an older snapshot; False where the present one is not older.

        ``first_open``: the first subtask of the first unfinished epoch. Raises as
        :meth:`commit` does.
        """
        self.write(meta, vector, state)
        keys = self._keys
        safe = NOTHING_SAFE if self._tensors.replicated else meta.version
        replaced = self._replace(
            keys=[keys.fence, keys.meta, keys.applied, keys.pushed, keys.tokens, keys.news,
                  *self.chunk_keys(meta)],
            args=[token, meta.version, meta.to_json(), first_open,
                  *record_fields(meta, record, safe)],
        )  # fmt: skip
        _check_chunks(replaced)
        return bool(replaced)

    def confirm(self, token: int, version: int) -> None:
        """Waits for the replicas, and lets workers forget what is in a version.

        Raises as :meth:`commit` does.
        """
        # WAIT is for what its own connection wrote, and for all that came before that
        self.takeover(token)
        self.advance(token, version)

    def advance(self, token: int, version: int) -> None:
        """Workers may forget what is in a version: the replicas have it, or are away."""
        keys = self._keys
        self._advance(keys=[keys.fence, keys.applied, keys.news], args=[token, version])

    def _remove_attempt(self, meta: Meta) -> None:
        """Removes chunks that came too late, unless they are of the snapshot that came first:
        the caller's own earlier attempt, or another worker's first snapshot, has their names."""
        used = [self.read().meta, *(pin.meta for pin in self.pins().values())]
        if (meta.version, meta.token) not in {(each.version, each.token) for each in used}:
            self.remove([meta])

    def commit(
        self, token: int, meta: Meta | None, change: Change, remove: Iterable[str] = ()
    ) -> None:
        """Publishes a version whose chunks are written, describes the present one anew, or only
        deals with refused updates.

        Where there are replicas, returns when they have it or are known to be away. Raises
        :class:`Fenced`, :class:`SnapshotMissing` where the server came back empty, and
        :class:`StoreUnavailable` where a failover brought back an older snapshot.
        """
        keys, replicated = self._keys, self._tensors.replicated
        applied = meta is not None and bool(change.fields)
        if applied and meta and not replicated:
            change = replace(change, fields={**change.fields, "safe": meta.version})
        chunks = self.chunk_keys(meta) if meta else []
        committed = self._commit(
            keys=[keys.fence, keys.meta, keys.applied, keys.pushed, keys.tokens, keys.stream,
                  keys.rejected, keys.pins, keys.places, keys.news, *chunks, *remove],
            args=[token, meta.to_json() if meta else "", change.to_json(), len(chunks)],
        )  # fmt: skip
        _check_chunks(committed)
        if applied and meta and replicated:
            self.advance(token, meta.version)

    def chunk_keys(self, meta: Meta) -> list[str]:
        """Of all that belongs to a version."""
        return self._vector_keys(meta) + self._state_keys(meta)

    def _vector_keys(self, meta: Meta) -> list[str]:
        return [
            self._keys.snapshot_chunk(meta.version, meta.token, name)
            for name in chunk_names(meta.floats, halves=meta.halves, planes=meta.planes)
        ]

    def _state_keys(self, meta: Meta) -> list[str]:
        names = chunk_names(meta.floats, halves=False) if meta.rule_state else []
        return [self._keys.snapshot_chunk(meta.version, meta.token, f"r{name}") for name in names]

    def remove(self, metas: Sequence[Meta]) -> None:
        doomed = [key for meta in metas for key in self.chunk_keys(meta)]
        if doomed:
            self._tensors.unlink(*doomed)

    def look(self) -> SnapshotView:
        with self._tensors.pipeline(transaction=True) as pipe:
            pipe.hmget(self._keys.applied, "version", "token", "safe")
            pipe.hkeys(self._keys.pins)
            pipe.smembers(self._keys.wanted)
            pipe.get(self._keys.fence)
            (version, writer, safe), pins, wanted, token = pipe.execute()
        return SnapshotView(
            None if version is None else int(version),
            int(writer or 0),
            NOTHING_SAFE if safe is None else int(safe),
            int(token or 0),
            frozenset(name.decode() for name in pins),
            tuple(sorted(name.decode() for name in wanted)),
        )

    # -- pins: snapshots that must stay while somebody reads them ------------------------------

    def want_pin(self, name: str) -> None:
        """Asks the parameter server to keep the present snapshot under a name."""
        self._tensors.sadd(self._keys.wanted, name)

    def pinned(self, name: str) -> Snapshot | None:
        text = self._tensors.hget(self._keys.pins, name)
        return None if text is None else from_pin(text)

    def pins(self) -> dict[str, Snapshot]:
        found = self._tensors.hgetall(self._keys.pins)
        return {name.decode(): from_pin(text) for name, text in found.items()}

    def unpin(self, name: str) -> None:
        """The parameter server removes the chunks at its next turn."""
        with self._tensors.pipeline(transaction=True) as pipe:
            pipe.srem(self._keys.wanted, name)
            pipe.hdel(self._keys.pins, name)
            pipe.execute()

    def pin(self, token: int, names: Sequence[str], snapshot: Snapshot) -> None:
        """Keeps a snapshot under names, and takes them off the list of wanted ones.

        Raises as :meth:`commit` does.
        """
        keys = self._keys
        self._pin(
            keys=[keys.fence, keys.pins, keys.wanted, keys.applied],
            args=[token, snapshot.meta.version, pin_text(snapshot), *names],
        )

    def forget(self) -> int:
        """Removes everything of this shard; returns how many keys there were."""
        doomed = list(self._tensors.scan_iter(match=f"{_escaped(self._keys.prefix)}*", count=1000))
        return self._unlink(doomed)

    def forget_orphans(self, token: int, keep: Iterable[Meta]) -> int:
        """Removes snapshot chunks that an interrupted publication left, up to one's own token:
        whoever has taken over in between may be publishing."""
        kept = {key.encode() for meta in keep for key in self.chunk_keys(meta)}
        pattern = f"{_escaped(self._keys.prefix)}s:*"
        doomed = [
            key
            for key in self._tensors.scan_iter(match=pattern, count=1000)
            if key not in kept and _writer(key) <= token
        ]
        return self._unlink(doomed)

    def _unlink(self, doomed: Sequence[bytes]) -> int:
        for start in range(0, len(doomed), 500):
            self._tensors.unlink(*doomed[start : start + 500])
        return len(doomed)


def _check_chunks(answer: int) -> None:
    if answer < 0:
        raise StoreUnavailable("the tensors server was replaced in the middle of a snapshot")


def _writer(chunk: bytes) -> int:
    """The token in the name of a snapshot's chunk, ``…s:<version>.<token>:<index>``."""
    return int(chunk.split(b":")[-2].partition(b".")[2])


def _escaped(prefix: str) -> str:
    return prefix.replace("[", r"\[").replace("]", r"\]").replace("*", r"\*")
