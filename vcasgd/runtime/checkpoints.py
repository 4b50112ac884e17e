"""Snapshots to and from object storage.

A checkpoint is one safetensors file that opens without us: the model's state under its own
names, and in the metadata everything else of the snapshot. One object is written atomically
by any storage, and its name carries its SHA-256, so a damaged one is always recognised.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from vcasgd.errors import CheckpointDamaged, NotFound
from vcasgd.learning.vector import Layout, named_tensors
from vcasgd.runtime.storage import Storage
from vcasgd.store.snapshots import Meta, Record, Snapshot, Totals, encode_integers

_NAME = re.compile(r"v(\d{12})-([0-9a-f]{64})\.safetensors$")
_METADATA = "vcasgd"
#: what reading something else than a checkpoint can raise
_NONSENSE = (
    SafetensorError,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    RuntimeError,
)


@dataclass(frozen=True)
class Stored:
    """A checkpoint as the storage lists it."""

    name: str
    version: int
    digest: str
    size: int


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read and found whole. ``floats`` float32, ``integers`` int64."""

    name: str
    snapshot: Snapshot
    floats: Tensor
    integers: Tensor


class Checkpoints:
    """The checkpoints of one job."""

    def __init__(self, storage: Storage, job: str) -> None:
        self._storage = storage
        self._prefix = f"jobs/{job}/checkpoints"

    def write(self, snapshot: Snapshot, layout: Layout, floats: Tensor) -> Stored:
        """Writes a snapshot. Raises :class:`~vcasgd.errors.StorageUnavailable`."""
        tensors = named_tensors(layout, floats, snapshot.meta.integer_vector())
        document = {
            "meta": asdict(snapshot.meta),
            "record": snapshot.record.to_dict(),
            "layout": layout.to_json(),
        }
        data = save(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            metadata={_METADATA: json.dumps(document), "format": "pt"},
        )
        digest = hashlib.sha256(data).hexdigest()
        name = f"v{snapshot.meta.version:012d}-{digest}.safetensors"
        self._storage.put(f"{self._prefix}/{name}", data)
        return Stored(name, snapshot.meta.version, digest, len(data))

    def all(self) -> list[Stored]:
        """Oldest first. Objects that are not checkpoints are passed over."""
        found = []
        for path, size in self._storage.names(self._prefix).items():
            match = _NAME.search(path)
            if match:
                found.append(Stored(match[0], int(match[1]), match[2], size))
        return sorted(found, key=lambda each: each.version)

    def read(self, name: str) -> Loaded:
        """Raises :class:`CheckpointDamaged`, :class:`~vcasgd.errors.NotFound`."""
        return parse(name, self.bytes(name))

    def bytes(self, name: str) -> bytes:
        """The file as it is, digest checked. Raises as :meth:`read` does."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise NotFound(f"{name} is not the name of a checkpoint", status=404)
        data = self._storage.get(f"{self._prefix}/{name}")
        if hashlib.sha256(data).hexdigest() != match[2]:
            raise CheckpointDamaged(f"checkpoint {name}: the digest does not match its content")
        return data

    def newest(self, damaged: Callable[[CheckpointDamaged], None]) -> Loaded | None:
        """The newest whole checkpoint; ``damaged`` is told of each one that is passed over.

        Those are set aside, so that none is taken for a checkpoint when the job comes to the
        same version again.
        """
        for stored in reversed(self.all()):
            try:
                return self.read(stored.name)
            except CheckpointDamaged as error:
                damaged(error)
                self._storage.move(
                    f"{self._prefix}/{stored.name}", f"{self._prefix}/damaged/{stored.name}.damaged"
                )
            except NotFound:
                continue  # pruned in between
        return None

    def prune(self, keep: int, protected: frozenset[str]) -> list[str]:
        """Deletes all but the newest ``keep`` and the protected ones; returns their names."""
        spare = [each.name for each in self.all()[:-keep] if each.name not in protected]
        for name in spare:
            self._storage.delete(f"{self._prefix}/{name}")
        return spare


def parse(name: str, data: bytes) -> Loaded:
    """A checkpoint's content. Raises :class:`CheckpointDamaged`."""
    try:
        tensors = load(data)
        document = _document(data)
        meta = document["meta"]
        snapshot = Snapshot(
            Meta(**{**meta, "totals": Totals(**meta["totals"])}),
            Record.from_dict(document["record"]),
        )
        layout = Layout.from_json(document["layout"])
        floats, integers = _vectors(layout, tensors)
    except _NONSENSE as error:
        raise CheckpointDamaged(f"checkpoint {name}: {type(error).__name__}: {error}") from error
    if snapshot.meta.floats != layout.floats:
        raise CheckpointDamaged(f"checkpoint {name}: its layout disagrees with its metadata")
    if snapshot.meta.integers != encode_integers(integers):
        raise CheckpointDamaged(f"checkpoint {name}: its counters disagree with its metadata")
    return Loaded(name, snapshot, floats, integers)


def _document(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    document: dict[str, Any] = json.loads(header["__metadata__"][_METADATA])
    return document


def _vectors(layout: Layout, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    floats = torch.empty(layout.floats)
    integers = torch.empty(layout.integers, dtype=torch.int64)
    for entry in layout.entries:
        tensor, part = tensors[entry.name], entry.view(floats, integers)
        # copying would spread one number over a whole layer
        if tensor.shape != part.shape:
            raise ValueError(f"{entry.name} has shape {list(tensor.shape)}")
        part.copy_(tensor)
    return floats, integers
