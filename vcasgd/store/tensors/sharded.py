"""Snapshots of a whole model, assembled from its shards on all store nodes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from vcasgd.learning.shards import Cut, ShardRange
from vcasgd.learning.vector import new_vector
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.model_pins import ModelPins, ModelSnapshot
from vcasgd.store.tensors.snapshot import Snapshot
from vcasgd.store.tensors.snapshot_store import SnapshotStore


class ShardedSnapshots(ModelPins):
    """Reader of a model's shards; raises as
    :class:`~vcasgd.store.tensors.snapshot_store.SnapshotStore` does."""

    def __init__(self, nodes: Sequence[RedisClient], job: str, cut: Cut) -> None:
        """Raise as :func:`~vcasgd.store.tensors.model_pins.check_nodes` does."""
        super().__init__(nodes, job, cut.shards)
        self._cut = cut
        self.shards = [
            SnapshotStore(nodes[part.shard], TensorKeys(job, part.shard)) for part in cut.parts
        ]

    def fetch_pinned(self, name: str) -> tuple[ModelSnapshot, Tensor]:
        """Return the snapshots pinned under a name and their vector, float32 [floats].

        Reads all nodes in parallel. Raises :class:`SnapshotMissing`.
        """
        out = new_vector(self._cut.floats)

        def fetch(part: ShardRange) -> Snapshot:
            return self.shards[part.shard].fetch_pinned(name, part.of(out))[0]

        with ThreadPoolExecutor(max_workers=len(self.shards)) as pool:
            return tuple(pool.map(fetch, self._cut.parts)), out

    def fetch_states(self, whole: ModelSnapshot) -> Tensor | None:
        """Return the rules' states in pinned versions, float32 [floats]; None if they have none.

        Raises :class:`SnapshotMissing`.
        """
        if not any(snapshot.meta.rule_state for snapshot in whole):
            return None
        # The state of a rule that has not applied an update yet is zero.
        out = torch.zeros(self._cut.floats)
        for part, snapshot in zip(self._cut.parts, whole, strict=True):
            state = self.shards[part.shard].fetch_state(snapshot.meta)
            if state is not None:
                part.of(out).copy_(state)
        return out
