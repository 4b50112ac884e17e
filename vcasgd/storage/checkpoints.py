"""Files of checkpoints in object storage.

Storages write one object atomically, and its name contains its SHA-256, so damage is always
detected. :mod:`vcasgd.storage.model_checkpoints` has the content.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vcasgd.errors import CheckpointDamaged, NotFound
from vcasgd.storage.objects import ObjectStream, Storage

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


class Checkpoints:
    """The checkpoints of one job."""

    def __init__(self, storage: Storage, job: str) -> None:
        self._storage = storage
        self._prefix = f"jobs/{job}/checkpoints"

    def put(
        self, versions: tuple[int, ...], chunks: Callable[[], Iterator[bytes]]
    ) -> StoredCheckpoint:
        """Store the file of these versions of all shards, in chunks.

        They are made twice, once for the name. Raises :class:`CheckpointDamaged` if they aren't the
        same, and :class:`~vcasgd.errors.StorageUnavailable`.
        """
        sha256, size = hashlib.sha256(), 0
        for chunk in chunks():
            sha256.update(chunk)
            size += len(chunk)
        digest = sha256.hexdigest()
        name = f"{_stem(versions)}-{digest}.safetensors"
        verified = _verified(chunks(), name, digest=digest)
        self._storage.put_stream(f"{self._prefix}/{name}", verified, size)
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
        return next((each for each in self.all() if each.stem == _stem(versions)), None)

    def bytes(self, name: str) -> bytes:
        """Return the file's bytes after checking their digest. Raises as :meth:`read` does."""
        return b"".join(self.open_stream(name).chunks)

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

    def delete_all(self) -> None:
        """Delete all of the job's objects, also damaged ones. You may repeat it."""
        for path in self._storage.names(self._prefix):
            self._storage.delete(path)

    def prune(self, keep: int, protected: frozenset[str]) -> list[str]:
        """Delete all but the newest ``keep`` and the protected checkpoints; return their names."""
        names = [each.name for each in self.all()[:-keep] if each.name not in protected]
        for name in names:
            self._storage.delete(f"{self._prefix}/{name}")
        return names


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
        raise CheckpointDamaged(f"checkpoint {name}: the digest does not match its content")
    if withheld:
        yield withheld


def _stem(versions: tuple[int, ...]) -> str:
    """Return the first shard's version and, with several shards, a short digest of all versions."""
    digest = hashlib.sha256(json.dumps(versions).encode()).hexdigest()
    return f"v{versions[0]:012d}" + (f".{digest[:8]}" if len(versions) > 1 else "")
