"""Files of checkpoints in object storage.

Storages write one object atomically, and its name contains its SHA-256, so damage is always
detected. A small object beside it has that of each piece, for readers of a part.
:mod:`vcasgd.storage.model_checkpoints` has the content.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

from vcasgd.errors import CheckpointDamaged, NotFound
from vcasgd.storage.objects import CHUNK_BYTES, ObjectStream, Storage

#: Bytes of a file that have a digest of their own; the last piece may be shorter.
PIECE_BYTES = CHUNK_BYTES
_DIGITS = 64
_NAME = re.compile(r"v(\d{12})(?:\.[0-9a-f]{8})?-([0-9a-f]{64})\.safetensors$")


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint as the storage lists it; ``size`` in bytes."""

    name: str
    #: Version of the first shard.
    version: int
    digest: str
    size: int

    @property
    def stem(self) -> str:
        """The part of the name that identifies the versions of all shards."""
        return self.name.partition("-")[0]

    def has(self, versions: tuple[int, ...]) -> bool:
        """Return True if these are the versions of all shards."""
        return self.stem == _stem(versions)


class Checkpoints:
    """The checkpoints of one job."""

    def __init__(self, storage: Storage, job: str) -> None:
        self._storage = storage
        self._prefix = f"jobs/{job}/checkpoints"

    def put(
        self, versions: tuple[int, ...], chunks: Callable[[], Iterator[bytes]]
    ) -> StoredCheckpoint:
        """Store the file of these versions of all shards, in chunks.

        They are made twice, once for the name. Call it only while no other one is written: what is
        left of unfinished ones is deleted first, to make room. Raises :class:`CheckpointDamaged` if
        the chunks aren't the same, and :class:`~vcasgd.errors.StorageUnavailable`.
        """
        self._storage.remove_unfinished(self._prefix)
        sha256, size, pieces = hashlib.sha256(), 0, []
        for piece in _pieces_of(chunks()):
            sha256.update(piece)
            pieces.append(hashlib.sha256(piece).hexdigest())
            size += len(piece)
        digest = sha256.hexdigest()
        name = f"{_stem(versions)}-{digest}.safetensors"
        verified = _verified(_pieces_of(chunks()), name, digest=digest)
        self._storage.put_stream(f"{self._prefix}/{name}", verified, size)
        # Last, because a file without it can be read as a whole, and pruning finds no other object.
        self._storage.put(f"{self._prefix}/{name}.pieces", "".join(pieces).encode())
        return StoredCheckpoint(name, versions[0], digest, size)

    def all(self) -> list[StoredCheckpoint]:
        """Return the stored checkpoints, oldest first, without objects of other kinds."""
        checkpoints = []
        for path, size in self._storage.names(self._prefix).items():
            match = _NAME.search(path)
            if match:
                checkpoints.append(StoredCheckpoint(match[0], int(match[1]), match[2], size))
        return sorted(checkpoints, key=lambda each: each.version)

    def find(self, versions: tuple[int, ...]) -> StoredCheckpoint | None:
        """Return the checkpoint of these versions of all shards, or None if there is none."""
        return next((each for each in self.all() if each.has(versions)), None)

    def open_stream(self, name: str) -> ObjectStream:
        """Return the file's size and its chunks, verified while you read them.

        Memory stays bounded at two chunks. The last chunk is withheld until the SHA-256 of all
        bytes matches the one in the name; otherwise the iterator raises
        :class:`CheckpointDamaged` in its place. A reader therefore never gets a damaged file as
        a whole.

        This method and the iterator raise :class:`~vcasgd.errors.NotFound` and
        :class:`~vcasgd.errors.StorageUnavailable`.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise NotFound(f"{name} is not the name of a checkpoint")
        stream = self._storage.stream(f"{self._prefix}/{name}")
        return ObjectStream(stream.size, _verified(stream.chunks, name, digest=match[2]))

    def copier(self, name: str, size: int, out: IO[bytes]) -> Callable[[int, int], None]:
        """Return a function that copies the pieces with some of the file's ``size`` bytes.

        They are verified, and get the same places in ``out``. Both raise
        :class:`CheckpointDamaged`, also if the pieces' digests are, and as :meth:`open_stream`
        does; older files have no digests of pieces.
        """
        path, copied = f"{self._prefix}/{name}", set[int]()
        if self._storage.size(f"{path}.pieces") != _DIGITS * -(-size // PIECE_BYTES):
            raise _damaged(name)
        digests = self._storage.get(f"{path}.pieces").decode("latin-1")

        def copy(start: int, stop: int) -> None:
            # A layout can say that a vector ends far beyond the file.
            last = -(-min(stop, size) // PIECE_BYTES)
            for number in {*range(start // PIECE_BYTES, last)} - copied:
                place, at = number * PIECE_BYTES, number * _DIGITS
                piece = self._storage.read(path, place, place + PIECE_BYTES)
                digest = hashlib.sha256(piece).hexdigest()
                if digest != digests[at : at + _DIGITS]:
                    raise _damaged(name)
                out.seek(place)
                out.write(piece)
                copied.add(number)

        return copy

    def delete_all(self) -> None:
        """Delete all of the job's objects, also damaged ones. You may repeat it."""
        for path in self._storage.names(self._prefix):
            self._storage.delete(path)
        self._storage.remove_unfinished(self._prefix)

    def prune(self, keep: int, protected: frozenset[str]) -> list[str]:
        """Delete all but the newest ``keep`` and the protected checkpoints; return their names."""
        names = [each.name for each in self.all()[:-keep] if each.name not in protected]
        for name in names:
            self.delete(name)
        return names

    def delete(self, name: str) -> None:
        """Delete a checkpoint, if there is one."""
        self._storage.delete(f"{self._prefix}/{name}.pieces")
        self._storage.delete(f"{self._prefix}/{name}")


def _pieces_of(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in pieces of :data:`PIECE_BYTES`."""
    piece = bytearray()
    for chunk in chunks:
        piece += chunk
        while len(piece) >= PIECE_BYTES:
            yield bytes(piece[:PIECE_BYTES])
            del piece[:PIECE_BYTES]
    if piece:
        yield bytes(piece)


def _verified(chunks: Iterator[bytes], name: str, digest: str) -> Iterator[bytes]:
    """Yield the chunks, the last one only if the digest of all of them is right."""
    sha256 = hashlib.sha256()
    withheld = b""
    for chunk in chunks:
        sha256.update(chunk)
        if withheld:
            yield withheld
        withheld = chunk
    if sha256.hexdigest() != digest:
        raise _damaged(name)
    if withheld:
        yield withheld


def _damaged(name: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"checkpoint {name}: the digest does not match its content")


def _stem(versions: tuple[int, ...]) -> str:
    """Return the first shard's version and, with several shards, a short digest of all versions."""
    digest = hashlib.sha256(json.dumps(versions).encode()).hexdigest()
    return f"v{versions[0]:012d}" + (f".{digest[:8]}" if len(versions) > 1 else "")
