"""Parts of a model and of its shared second moments, on all store nodes of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from vcasgd.learning.shards import Cut, ShardRange
from vcasgd.learning.vector import Floats, MappedVector, new_vector
from vcasgd.store.bulk_transfer import BulkTransfer, Missing, WrongLength
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.chunks import chunk_names, outgoing, receive
from vcasgd.store.tensors.snapshot import Snapshot
from vcasgd.store.tensors.snapshot_index import ModelPins, ModelSnapshot
from vcasgd.store.tensors.snapshot_store import STATE, SnapshotStore

#: Shards that are mapped at a time, if vectors are.
MAPPED_SHARDS = 2
#: Digits of the largest stored count.
DIGITS = 15


class ShardedSnapshots(ModelPins):
    """Reader of a model's shards; raises as :class:`SnapshotStore` does."""

    def __init__(self, nodes: Sequence[RedisClient], job: str, cut: Cut) -> None:
        """``nodes`` are those of each shard."""
        super().__init__(nodes, job, cut.shards)
        self._cut = cut
        self.shards = [
            SnapshotStore(nodes[part.shard], TensorKeys(job, part.shard)) for part in cut.parts
        ]

    def fetch_pinned(self, name: str, *, mapped: bool = False) -> tuple[ModelSnapshot, Any]:
        """Return the snapshots pinned under a name and their vector, float32 [floats].

        It may be ``mapped``. Reads all nodes in parallel. Raises :class:`SnapshotMissing`.
        """
        new: Callable[[int], Floats] = MappedVector if mapped else new_vector
        out = new(self._cut.floats)

        def fetch(part: ShardRange) -> Snapshot:
            return self.shards[part.shard].fetch_pinned(name, part.of(out))[0]

        most = MAPPED_SHARDS if mapped else len(self.shards)
        with ThreadPoolExecutor(max_workers=most) as pool:
            return tuple(pool.map(fetch, self._cut.parts)), out

    def pieces(self, whole: ModelSnapshot) -> Iterator[Tensor]:
        """Yield the vector of pinned snapshots piece by piece, float32 [n] each.

        Each is valid until the next one. Raises :class:`SnapshotMissing`.
        """
        for store, snapshot in zip(self.shards, whole, strict=True):
            yield from store.pieces(snapshot.meta)

    def state_pieces(self, whole: ModelSnapshot) -> Iterator[Tensor]:
        """Yield the rules' states in pinned snapshots, as :meth:`pieces`; zeros without one."""
        for store, snapshot in zip(self.shards, whole, strict=True):
            if snapshot.meta.rule_state:
                yield from store.pieces(snapshot.meta, STATE)
            else:
                yield torch.zeros(snapshot.meta.floats)

    def fetch_states(self, whole: ModelSnapshot, first: Any) -> Any:
        """Return the rules' states in pinned versions, float32 [floats]; None if they have none.

        ``first``, float32 [floats], is the state without any update. Raises
        :class:`SnapshotMissing`.
        """
        if not any(snapshot.meta.rule_state for snapshot in whole):
            return None
        out = first.clone()
        for part, snapshot in zip(self._cut.parts, whole, strict=True):
            state = self.shards[part.shard].fetch_state(snapshot.meta)
            if state is not None:
                part.of(out).copy_(state)
        return out


class SharedMoments:
    """Second moments of the optimizer that the workers of a job share.

    They are an estimate, so nothing protects their consistency: workers overwrite them chunk by
    chunk, and a mixture of two estimates is one as well. A job works without them, for example
    after its tensors server came back empty. Methods raise as those of the clients do.
    """

    def __init__(self, nodes: Sequence[RedisClient], job: str, used: int) -> None:
        self._nodes = list(nodes[:used])
        self._transfers = [BulkTransfer(node) for node in self._nodes]
        self._keys = [TensorKeys(job, shard) for shard in range(used)]

    def take_turn(self, worker: str, seconds: float) -> bool:
        """Return True for one worker in ``seconds`` seconds; it should write its moments."""
        keys = self._keys[0]
        turn = self._nodes[0].set(keys.moments("turn"), worker, nx=True, px=int(seconds * 1000))
        return bool(turn)

    def write(self, moments: Tensor, made: int, rollbacks: int) -> None:
        """Write moments, bfloat16 [n], of an optimizer that made ``made`` steps
        since the training went back ``rollbacks`` times."""
        for transfer, names, part in self._parts(moments):
            transfer.store(zip(names, outgoing(part, split=True, exact=False), strict=True))
        self._nodes[0].set(self._keys[0].moments("steps"), f"{rollbacks}:{made}")

    def read(self, count: int, rollbacks: int) -> tuple[Tensor, int] | None:
        """Return ``count`` moments, float32 [count], and the steps behind them.

        Returns None if there are none of this length after as many rollbacks. A worker wrote them,
        so each may be any float.
        """
        text = self._nodes[0].get(self._keys[0].moments("steps")) or b""
        after, _, made = text.partition(b":")
        if not (_is_count(after) and _is_count(made) and int(after) == rollbacks and int(made)):
            return None
        moments = new_vector(count)
        try:
            for transfer, names, part in self._parts(moments):
                receive(transfer, names, part, split=True, exact=False)
        except (Missing, WrongLength):
            return None
        return moments, int(made)

    def _parts(self, moments: Tensor) -> Iterator[tuple[BulkTransfer, list[str], Tensor]]:
        cut = Cut(len(moments), len(moments), len(self._nodes))
        for transfer, keys, place in zip(self._transfers, self._keys, cut.parts, strict=True):
            part = place.of(moments)
            names = chunk_names(len(part), split=True, exact=False)
            yield transfer, [keys.moments(name) for name in names], part


def _is_count(text: bytes) -> bool:
    return text.isdigit() and len(text) <= DIGITS
