"""Snapshots to and from object storage.

A checkpoint is one safetensors file that opens without us: the model's state under its own
names, and in the metadata everything else of the snapshot, shard by shard. One object is written
atomically by any storage, and its name carries its SHA-256, so a damaged one is always recognised.
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
from vcasgd.learning.shards import Cut, ShardRange
from vcasgd.learning.vector import Layout, named_tensors
from vcasgd.storage.objects import Storage
from vcasgd.store.tensors.sharded import Whole, versions_of
from vcasgd.store.tensors.snapshot import Meta, Record, Snapshot, encode_integers

_NAME = re.compile(r"v(\d{12})(?:\.[0-9a-f]{8})?-([0-9a-f]{64})\.safetensors$")
_METADATA = "vcasgd"
#: what the update rule remembers, float32 [floats], beside the tensors of the model
_STATE = "vcasgd:rule_state"
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
    #: of the first shard
    version: int
    digest: str
    size: int

    @property
    def stem(self) -> str:
        """Names the versions of all shards."""
        return self.name.partition("-")[0]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read and found whole. ``floats`` float32, ``integers`` int64,
    ``state`` of the update rule float32 [floats], or None where it needs none."""

    name: str
    whole: Whole
    floats: Tensor
    integers: Tensor
    state: Tensor | None = None

    def part(self, part: ShardRange) -> tuple[Snapshot, Tensor, Tensor | None]:
        """One shard with its own record, float32 [part.floats] that keep no other alive, and the
        state of its rule."""
        snapshot = self.whole[part.shard]
        state = self.state if snapshot.meta.rule_state else None
        if len(self.whole) == 1:
            return snapshot, self.floats, state
        own = None if state is None else part.of(state).clone()
        return snapshot, part.of(self.floats).clone(), own


class Checkpoints:
    """The checkpoints of one job."""

    def __init__(self, storage: Storage, job: str) -> None:
        self._storage = storage
        self._prefix = f"jobs/{job}/checkpoints"

    def write(
        self, whole: Whole, layout: Layout, floats: Tensor, state: Tensor | None = None
    ) -> Stored:
        """Writes the snapshots of all shards, their vector, and the state of their rules, both
        float32 [floats].

        Raises :class:`~vcasgd.errors.StorageUnavailable`.
        """
        tensors = named_tensors(layout, floats, whole[0].meta.integer_vector())
        if state is not None:
            tensors[_STATE] = state
        document = {
            "shards": [
                {"meta": asdict(each.meta), "record": each.record.to_dict()} for each in whole
            ],
            "layout": layout.to_json(),
        }
        data = save(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            metadata={_METADATA: json.dumps(document), "format": "pt"},
        )
        digest = hashlib.sha256(data).hexdigest()
        name = f"{_stem(versions_of(whole))}-{digest}.safetensors"
        self._storage.put(f"{self._prefix}/{name}", data)
        return Stored(name, whole[0].meta.version, digest, len(data))

    def all(self) -> list[Stored]:
        """Oldest first. Objects that are not checkpoints are passed over."""
        found = []
        for path, size in self._storage.names(self._prefix).items():
            match = _NAME.search(path)
            if match:
                found.append(Stored(match[0], int(match[1]), match[2], size))
        return sorted(found, key=lambda each: each.version)

    def find(self, versions: tuple[int, ...]) -> Stored | None:
        """The one of these versions of all shards, if it is there."""
        return next((each for each in self.all() if each.stem == _stem(versions)), None)

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

    def newest(
        self, damaged: Callable[[CheckpointDamaged], None], shards: int = 1
    ) -> Loaded | None:
        """The newest whole checkpoint; ``damaged`` is told of each one that is passed over.

        Those are set aside, so that none is taken for a checkpoint when the job comes to the
        same version again.
        """
        for stored in reversed(self.all()):
            try:
                return _of_shards(self.read(stored.name), shards)
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
        whole = tuple(_snapshot(each) for each in document["shards"])
        layout = Layout.from_json(document["layout"])
        floats, integers = _vectors(layout, tensors)
        state = _state(whole, layout, tensors)
    except _NONSENSE as error:
        raise CheckpointDamaged(f"checkpoint {name}: {type(error).__name__}: {error}") from error
    parts = Cut(layout.floats, layout.parameters, len(whole), layout.sent).parts
    if not whole or any(
        each.meta.floats != part.floats for each, part in zip(whole, parts, strict=True)
    ):
        raise CheckpointDamaged(f"checkpoint {name}: its layout disagrees with its metadata")
    if whole[0].meta.integers != encode_integers(integers):
        raise CheckpointDamaged(f"checkpoint {name}: its counters disagree with its metadata")
    return Loaded(name, whole, floats, integers, state)


def _of_shards(loaded: Loaded, shards: int) -> Loaded:
    if len(loaded.whole) != shards:
        raise CheckpointDamaged(
            f"checkpoint {loaded.name} is of a model on {len(loaded.whole)} store nodes, "
            f"and this job's is on {shards}"
        )
    return loaded


def _stem(versions: tuple[int, ...]) -> str:
    """The first shard's version, and where there are others a short digest of all."""
    all_of_them = hashlib.sha256(json.dumps(versions).encode()).hexdigest()
    return f"v{versions[0]:012d}" + (f".{all_of_them[:8]}" if len(versions) > 1 else "")


def _snapshot(value: dict[str, Any]) -> Snapshot:
    return Snapshot(Meta.from_dict(value["meta"]), Record.from_dict(value["record"]))


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


def _state(whole: Whole, layout: Layout, tensors: dict[str, Tensor]) -> Tensor | None:
    if not any(each.meta.rule_state for each in whole):
        return None
    state = tensors[_STATE]
    if state.shape != (layout.floats,) or state.dtype != torch.float32:
        raise ValueError(f"the rule's state has shape {list(state.shape)}")
    return state
