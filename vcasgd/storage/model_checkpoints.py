"""Checkpoints of a model: snapshots of all its shards as one safetensors file.

Plain safetensors can open it: it has the model's state under its own names, and in the metadata
the rest of the snapshots, shard by shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from vcasgd.errors import CheckpointDamaged, NotFound
from vcasgd.learning.layout import Layout
from vcasgd.learning.shards import Cut, ShardRange
from vcasgd.learning.vector import named_tensors, vectors_of
from vcasgd.storage.checkpoints import Checkpoints, StoredCheckpoint
from vcasgd.store.tensors.snapshot import Snapshot, encode_integers
from vcasgd.store.tensors.snapshot_index import ModelSnapshot, versions_of

_METADATA = "vcasgd"
#: Name of the update rule's state, float32 [floats], stored beside the model's tensors.
_RULE_STATE = "vcasgd:rule_state"
#: Errors of parsing a file that is not a checkpoint.
_PARSE_ERRORS = (
    SafetensorError,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    RuntimeError,
)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was read and verified.

    ``floats`` is float32 [floats], ``integers`` int64 [integers], and ``state``, the update rule's
    state, float32 [floats], or None if the rule has none.
    """

    name: str
    whole: ModelSnapshot
    floats: Tensor
    integers: Tensor
    state: Tensor | None = None

    def part(self, part: ShardRange) -> tuple[Snapshot, Tensor, Tensor | None]:
        """Return one shard: its snapshot, its vector, and its rule state or None.

        Both tensors are float32 [part.floats] and do not keep the other shards in memory.
        """
        snapshot = self.whole[part.shard]
        state = self.state if snapshot.meta.rule_state else None
        if len(self.whole) == 1:
            return snapshot, self.floats, state
        own = None if state is None else part.of(state).clone()
        return snapshot, part.of(self.floats).clone(), own


class ModelCheckpoints(Checkpoints):
    """The checkpoints of one job, with their content."""

    def write(
        self,
        whole: ModelSnapshot,
        layout: Layout,
        floats: Tensor,
        state: Tensor | None = None,
        adapter: str = "",
    ) -> StoredCheckpoint:
        """Write the snapshots of all shards, their vector, and the state of their rules.

        ``floats`` and ``state`` are float32 [floats]. ``adapter`` is that of the model's facts.
        Raises :class:`~vcasgd.errors.StorageUnavailable`.
        """
        tensors = named_tensors(layout, floats, whole[0].meta.integer_vector())
        if state is not None:
            tensors[_RULE_STATE] = state
        document = {
            "shards": [snapshot.to_dict() for snapshot in whole],
            "layout": layout.to_json(),
            "adapter": adapter,
        }
        data = save(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            metadata={_METADATA: json.dumps(document), "format": "pt"},
        )
        return self.put(versions_of(whole), data)

    def read(self, name: str) -> LoadedCheckpoint:
        """Read and verify a checkpoint.

        Raises :class:`CheckpointDamaged`, :class:`~vcasgd.errors.NotFound` and
        :class:`~vcasgd.errors.StorageUnavailable`.
        """
        return parse(name, self.bytes(name))

    def newest(
        self, damaged: Callable[[CheckpointDamaged], None], shards: int = 1
    ) -> LoadedCheckpoint | None:
        """Return the newest intact checkpoint, or None.

        Calls ``damaged`` with each damaged one and moves it to ``damaged/``, so that it does not
        count as stored when the job reaches the same version again.
        """
        for stored in reversed(self.all()):
            try:
                return _with_shards(self.read(stored.name), shards)
            except CheckpointDamaged as error:
                damaged(error)
                self._storage.move(
                    f"{self._prefix}/{stored.name}", f"{self._prefix}/damaged/{stored.name}.damaged"
                )
            except NotFound:
                continue  # pruned in between
        return None


def parse(name: str, data: bytes) -> LoadedCheckpoint:
    """Parse a checkpoint file. Raises :class:`CheckpointDamaged`."""
    try:
        tensors = load(data)
        document = _document(data)
        whole = tuple(Snapshot.from_dict(each) for each in document["shards"])
        layout = Layout.from_json(document["layout"])
        floats, integers = vectors_of(layout, tensors)
        state = _rule_state(whole, layout, tensors)
    except _PARSE_ERRORS as error:
        raise CheckpointDamaged(f"checkpoint {name}: {type(error).__name__}: {error}") from error
    parts = Cut(layout.floats, layout.parameters, len(whole)).parts
    if not whole or any(
        each.meta.floats != part.floats for each, part in zip(whole, parts, strict=True)
    ):
        raise CheckpointDamaged(f"checkpoint {name}: its layout disagrees with its metadata")
    if whole[0].meta.integers != encode_integers(integers):
        raise CheckpointDamaged(f"checkpoint {name}: its counters disagree with its metadata")
    return LoadedCheckpoint(name, whole, floats, integers, state)


def _with_shards(loaded: LoadedCheckpoint, shards: int) -> LoadedCheckpoint:
    if len(loaded.whole) != shards:
        raise CheckpointDamaged(
            f"checkpoint {loaded.name} has {len(loaded.whole)} shards, one per store node, "
            f"but this job has {shards}"
        )
    return loaded


def _document(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    document: dict[str, Any] = json.loads(header["__metadata__"][_METADATA])
    return document


def _rule_state(whole: ModelSnapshot, layout: Layout, tensors: dict[str, Tensor]) -> Tensor | None:
    if not any(each.meta.rule_state for each in whole):
        return None
    state = tensors[_RULE_STATE]
    if state.shape != (layout.floats,) or state.dtype != torch.float32:
        raise ValueError(f"the rule's state has shape {list(state.shape)}")
    return state
