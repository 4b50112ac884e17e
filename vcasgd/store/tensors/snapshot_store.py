"""Access to snapshots in the tensors server: parameters, rule state, version, applied record.

A snapshot's chunks are written first, under names that no reader uses yet. One script then makes
them the present snapshot, together with everything that has to change with it. A reader therefore
sees the old snapshot or the new one, never a mixture.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from vcasgd.errors import Fenced, JobUnreadable, SnapshotMissing, StoreUnavailable
from vcasgd.learning.encodings.steps import StepFormat, checksum
from vcasgd.store.bulk_transfer import BulkTransfer, Missing, WrongLength
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.chunks import (
    CHUNK_BYTES,
    add_steps,
    bytes_of,
    chunk_count,
    chunk_names,
    chunks_of,
    chunks_of_step,
    outgoing,
    path,
    receive,
    steps_to,
)
from vcasgd.store.tensors.snapshot import (
    Change,
    Meta,
    Record,
    Snapshot,
    pin_text,
    record_fields,
)
from vcasgd.store.tensors.snapshot_index import NOTHING_SAFE, SnapshotIndex

log = logging.getLogger(__name__)

#: Attempts of a reader, which starts over each time a publication replaces the snapshot.
READ_ATTEMPTS = 50
INCOMPLETE = "the snapshot is no longer complete"
REPLACED_TOO_OFTEN = "the snapshot was replaced faster than it could be read"
#: Chunks that are in a process at a time if it needs no whole vector; an even number.
KEYS_OF_PIECE = 8
#: Chunks of the previous version that make room for as many of the next one at a time.
REMOVED_CHUNKS = 16
#: Name of the chunk of a snapshot that has a single one and isn't split into halves.
ONLY_CHUNK = "0"
#: First letters of the chunks of the rule's state, and of the vector that workers train from if it
#: is not the exact one.
STATE, FOLLOWED = "r", "p"


class SnapshotStore(SnapshotIndex):
    """The snapshots of one shard of one job. Methods raise as those of the client do."""

    def __init__(self, tensors: RedisClient, keys: TensorKeys) -> None:
        super().__init__(tensors, keys)
        self._transfer = BulkTransfer(tensors)
        # Workers rely on the results of these scripts, so they wait for the replicas.
        acknowledged = tensors.waiting()
        self._takeover = acknowledged.script("tensors/takeover")
        self._install = acknowledged.script("tensors/install")
        self._replace = acknowledged.script("tensors/replace")
        self._commit = acknowledged.script("tensors/commit")
        self._advance = tensors.script("tensors/advance")
        self._drop = tensors.script("tensors/drop")
        self._pin = tensors.script("tensors/pin")

    # -- reading -------------------------------------------------------------------------------

    def fetch(self, out: Tensor) -> Snapshot:
        """Read the present parameters into ``out``, float32 [floats], with the applied record.

        Raises :class:`SnapshotMissing`, and :class:`StoreUnavailable` if the snapshot was replaced
        too often meanwhile.
        """
        for _ in range(READ_ATTEMPTS):
            snapshot = self.read()
            if self._receive(snapshot.meta, out):
                return snapshot
        raise StoreUnavailable(REPLACED_TOO_OFTEN)

    def fetch_rounded(self, out: Tensor, meta: Meta | None = None, content: bytes = b"") -> Meta:
        """Read the present parameters into ``out``, float32 [floats].

        They are rounded to bfloat16 if the snapshot is split into halves, which reads half the
        bytes. If it is stepped, they are those that workers train from. ``meta`` is the present
        description, if it was just read, and ``content`` its chunk :data:`ONLY_CHUNK`, if that was,
        too. Raises as :meth:`fetch`.
        """
        if meta and content and self._unpack(meta, content, out):
            return meta
        for _ in range(READ_ATTEMPTS):
            meta = meta or self.read_meta()
            if self._receive(meta, out, rounded=True):
                return meta
            meta = None
        raise StoreUnavailable(REPLACED_TOO_OFTEN)

    def follow(
        self,
        out: Tensor,
        base: tuple[int, int] | None,
        steps: StepFormat,
        meta: Meta | None = None,
    ) -> Meta:
        """Do what :meth:`fetch_rounded` does, with fewer bytes if possible.

        ``out`` has the version and the writer ``base``, to which this adds the steps since then.
        """
        meta = meta or self.read_meta()
        if base == (meta.version, meta.token):
            return meta
        way = path(meta, base)
        if way and add_steps(self._transfer, self._keys, way, out, steps):
            if checksum(out) == meta.checksum:
                return meta
            log.warning("version %d is not what its steps lead to", meta.version)
        # A part of the steps may have been added.
        return self.fetch_rounded(out, meta)

    def fetch_pinned(self, name: str, out: Tensor | None = None) -> tuple[Snapshot, Tensor]:
        """Read the snapshot pinned under a name. Raises :class:`SnapshotMissing`."""
        pinned = self.pinned(name)
        if pinned is None:
            raise SnapshotMissing(f"no snapshot is pinned under the name {name}")
        if out is None:
            out = torch.empty(pinned.meta.floats)
        if not self._receive(pinned.meta, out):
            raise SnapshotMissing(f"the snapshot {name} is no longer complete")
        return pinned, out

    def pieces(self, meta: Meta, kind: str = "") -> Iterator[Tensor]:
        """Yield the vector of a pinned version, or its :data:`STATE`, piece by piece.

        Each is float32 [n] and valid until the next one. Raises :class:`SnapshotMissing`.
        """
        keys = self._keys_beside(meta, kind) if kind else self._vector_keys(meta)
        split, exact = meta.halves and not kind, meta.exact or bool(kind)
        floats_of_key = CHUNK_BYTES // (4 if exact or not split else 2)
        buffer = torch.empty(min(meta.floats, KEYS_OF_PIECE * floats_of_key))
        for first in range(0, len(keys), KEYS_OF_PIECE):
            piece = buffer[: meta.floats - first * floats_of_key]
            names = keys[first : first + KEYS_OF_PIECE]
            if not self._load(names, piece, split=split, exact=exact):
                raise SnapshotMissing(INCOMPLETE)
            yield piece

    def _unpack(self, meta: Meta, content: bytes, out: Tensor) -> bool:
        target = bytes_of(out)
        if meta.halves or meta.stepped or not len(content) == len(target) == 4 * meta.floats:
            return False
        target[:] = content
        self._tensors.count_bulk(len(content))
        return True

    def _receive(self, meta: Meta, out: Tensor, *, rounded: bool = False) -> bool:
        if out.numel() != meta.floats:
            raise JobUnreadable(
                f"a vector of {out.numel()} floats can't hold a snapshot of {meta.floats}"
            )
        exact = meta.exact and not rounded
        keys = self._vector_keys(replace(meta, exact=exact))
        if rounded and meta.stepped:
            keys = self._keys_beside(meta, FOLLOWED)
        return self._load(keys, out, split=meta.halves, exact=exact)

    def _load(self, keys: list[str], out: Tensor, *, split: bool, exact: bool) -> bool:
        """Receive chunks into ``out``; return False if one is missing."""
        try:
            receive(self._transfer, keys, out, split=split, exact=exact)
        except Missing:
            return False
        except WrongLength as error:
            raise JobUnreadable(f"chunk {error.index} of a snapshot is {error.value}") from error
        return True

    def fetch_state(self, meta: Meta) -> Tensor | None:
        """Return the rule's state in a present or pinned version, float32 [floats], or None.

        Raises :class:`SnapshotMissing`.
        """
        return self._fetch_beside(meta, STATE) if meta.rule_state else None

    def fetch_followed(self, meta: Meta) -> Tensor | None:
        """Return the vector that workers train from in the present version, float32 [floats].

        Returns None if it is the exact one. Raises :class:`SnapshotMissing`.
        """
        return self._fetch_beside(meta, FOLLOWED) if meta.stepped else None

    def _fetch_beside(self, meta: Meta, kind: str) -> Tensor:
        out = torch.empty(meta.floats)
        if not self._load(self._keys_beside(meta, kind), out, split=False, exact=True):
            raise SnapshotMissing(INCOMPLETE)
        return out

    # -- writing: by the parameter server, or by a worker if there is no snapshot yet ----------

    def write(
        self,
        meta: Meta,
        vector: Tensor,
        state: Tensor | None = None,
        followed: Tensor | None = None,
        step: memoryview | None = None,
        *,
        base: int = 0,
        instead_of: Sequence[str] = (),
    ) -> None:
        """Write the chunks of a version, which readers do not see before it is committed.

        ``state``, if given, is the update rule's; it belongs to ``meta.rule_state``. ``followed``
        belongs to ``meta.stepped``, and ``step``, which leads to it, to the last of ``meta.steps``.
        ``instead_of`` are chunks of the version before ``base``, the present one. They are removed
        piece by piece, so that both versions together take the room of one.
        """
        items = [
            zip(
                self._vector_keys(meta),
                outgoing(vector, split=meta.halves, exact=meta.exact),
                strict=True,
            )
        ]
        for beside, name in ((state, STATE), (followed, FOLLOWED)):
            if beside is not None:
                chunks = outgoing(beside, split=False)
                items.append(zip(self._keys_beside(meta, name), chunks, strict=True))
        self._transfer.store(self._removing(instead_of, meta.token, base, chain(*items)))
        if step is not None and meta.steps:
            keys = self.step_keys(meta)[-chunk_count(len(step)) :]
            self._transfer.store(zip(keys, chunks_of(step), strict=True))

    def _removing(
        self, chunks: Sequence[str], token: int, base: int, items: Iterable[tuple[str, memoryview]]
    ) -> Iterator[tuple[str, memoryview]]:
        """Yield the items; before each :data:`REMOVED_CHUNKS`, remove as many of the chunks.

        The first items replace the first chunks, so a reader that began earlier stays ahead.
        """
        guards, removed = [self._keys.fence, self._keys.applied], 0
        for index, item in enumerate(items):
            if index == removed < len(chunks):
                removed += REMOVED_CHUNKS
                self._drop(keys=[*guards, *chunks[index:removed]], args=[token, base])
            yield item
        if chunks[removed:]:
            self._drop(keys=[*guards, *chunks[removed:]], args=[token, base])

    def complete(self, meta: Meta, vector: Tensor) -> Meta:
        """Add the low halves to a version, and return its new description, to be committed.

        The high halves are written again, because they may have been rounded differently. Does
        nothing if the version is exact.
        """
        if not meta.exact:
            meta = replace(meta, exact=True)
            self.write(meta, vector)
        return meta

    def takeover(self, token: int) -> None:
        """Reject writes under older tokens from now on. Raises :class:`Fenced` if one is newer."""
        self._takeover(keys=[self._keys.fence], args=[token])

    def install(
        self,
        token: int,
        meta: Meta,
        record: Record,
        vector: Tensor,
        state: Tensor | None = None,
        followed: Tensor | None = None,
        *,
        stored: bool = True,
    ) -> bool:
        """Make this the present snapshot if there is none; return False if there is one.

        ``stored``: the snapshot can be restored from elsewhere (no update was applied yet, or
        there is a checkpoint), so workers need not wait until it is on the replicas.
        """
        self.write(meta, vector, state, followed)
        keys = self._keys
        safe = meta.version if stored or not self._tensors.replicated else NOTHING_SAFE
        installed = self._install(
            keys=[keys.fence, keys.meta, keys.applied, keys.pushed, keys.tokens, keys.stream,
                  keys.rejected, keys.push_slots, keys.news, *self.chunk_keys(meta)],
            args=[token, meta.to_json(), *record_fields(meta, record, safe)],
        )  # fmt: skip
        _check_chunks(installed)
        if not installed:
            self._remove_attempt(meta, self.chunk_keys(meta))
        return bool(installed)

    def replace(
        self,
        token: int,
        meta: Meta,
        record: Record,
        vector: Tensor,
        state: Tensor | None = None,
        followed: Tensor | None = None,
        *,
        first_open: int,
    ) -> bool:
        """Replace an older snapshot with this one; return False if the present one is not older.

        ``first_open`` is the first subtask of the first unfinished epoch. Raises as
        :meth:`commit` does.
        """
        self.write(meta, vector, state, followed)
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

    def advance(self, token: int, version: int) -> None:
        """Let workers drop the updates in a version: the replicas have it, or are away."""
        keys = self._keys
        self._advance(keys=[keys.fence, keys.applied, keys.news], args=[token, version])

    def _remove_attempt(self, meta: Meta, chunks: Sequence[str]) -> None:
        """Delete the chunks of a late attempt, unless an existing snapshot uses them.

        The caller's own earlier attempt, or another worker's first snapshot, has the same names.
        """
        used = [self.read_meta(), *(pin.meta for pin in self.pins().values())]
        if (meta.version, meta.token) not in {(each.version, each.token) for each in used}:
            self._unlink(chunks)

    def commit(self, token: int, meta: Meta, change: Change, remove: Iterable[str] = ()) -> None:
        """Publish a version whose chunks are written, or update the description of the present one.

        If there are replicas, returns when they have the version or are known to be away. Raises
        :class:`Fenced`, :class:`SnapshotMissing` if the server came back empty, and
        :class:`StoreUnavailable` if a failover brought back an older snapshot.
        """
        keys, replicated = self._keys, self._tensors.replicated
        applied = bool(change.fields)
        if applied and not replicated:
            change = replace(change, fields={**change.fields, "safe": meta.version})
        chunks = self.chunk_keys(meta)
        if meta.steps:
            chunks += self.step_keys(meta)[-chunk_count(meta.steps[-1].size) :]
        try:
            committed = self._commit(
                keys=[keys.fence, keys.meta, keys.applied, keys.pushed, keys.tokens, keys.stream,
                      keys.rejected, keys.pins, keys.push_slots, keys.news, *chunks, *remove],
                args=[token, meta.to_json(), change.to_json(), len(chunks)],
            )  # fmt: skip
        except Fenced:
            self._remove_attempt(meta, chunks)
            raise
        _check_chunks(committed)
        if applied and replicated:
            self.advance(token, meta.version)

    def chunk_keys(self, meta: Meta) -> list[str]:
        """Return the keys of all chunks of a version, without those of steps."""
        keys = self._vector_keys(meta)
        if meta.rule_state:
            keys += self._keys_beside(meta, STATE)
        return keys + self._keys_beside(meta, FOLLOWED) if meta.stepped else keys

    def step_keys(self, meta: Meta) -> list[str]:
        """Return the keys of the chunks of all steps in a description, the newest last."""
        return [key for step in steps_to(meta) for key in chunks_of_step(self._keys, step)]

    def _vector_keys(self, meta: Meta) -> list[str]:
        return [
            self._keys.snapshot_chunk(meta.version, meta.token, name)
            for name in chunk_names(meta.floats, split=meta.halves, exact=meta.exact)
        ]

    def _keys_beside(self, meta: Meta, kind: str) -> list[str]:
        """Return the keys of another float32 vector of a version, :data:`STATE` or
        :data:`FOLLOWED`."""
        names = chunk_names(meta.floats, split=False)
        return [
            self._keys.snapshot_chunk(meta.version, meta.token, f"{kind}{name}") for name in names
        ]

    def remove(self, meta: Meta) -> None:
        """Delete the chunks of a version."""
        self._unlink(self.chunk_keys(meta))

    def pin(self, token: int, names: Sequence[str], snapshot: Snapshot) -> None:
        """Pin the present snapshot under names, and remove their requests.

        Raises as :meth:`commit` does.
        """
        keys = self._keys
        self._pin(
            keys=[keys.fence, keys.pins, keys.pin_requests, keys.applied],
            args=[token, snapshot.meta.version, pin_text(snapshot), *names],
        )

    def delete_orphans(self, token: int, keep: Iterable[Meta]) -> int:
        """Delete the snapshot chunks of interrupted publications, and return their number.

        Chunks of ``keep`` stay, and so do chunks under newer tokens, whose server may be
        publishing now.
        """
        kept = {key.encode() for meta in keep for key in self.chunk_keys(meta)}
        orphans = [key for key in self._scan("s:") if key not in kept and _writer(key) <= token]
        return self._unlink(orphans)


def _check_chunks(answer: int) -> None:
    if answer < 0:
        raise StoreUnavailable("the tensors server was replaced while a snapshot was written")


def _writer(chunk: bytes) -> int:
    """Return the token in the name of a chunk, ``…s:<version>.<token>:<index>``; 0 in any other,
    which a worker chose beside its first snapshot."""
    token = chunk.split(b":")[-2].partition(b".")[2]
    return int(token) if token.isdigit() and len(token) <= 16 else 0
