"""Second moments that the workers of a job share, on the job's store nodes.

They are an estimate, so nothing protects their consistency: workers overwrite them chunk by chunk,
and a mixture of two estimates is one as well. A job works without them, for example after its
tensors server came back empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vcasgd.learning.shards import Cut
from vcasgd.learning.vector import new_vector
from vcasgd.store.bulk_transfer import BulkTransfer, Missing, WrongLength
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.bf16_split import chunk_names, outgoing, receive

#: Digits of the largest stored count.
DIGITS = 15


class SharedMoments:
    """Second moments of one job. Methods raise as those of the clients do."""

    def __init__(self, nodes: Sequence[RedisClient], job: str, shards: int) -> None:
        self._nodes = list(nodes[:shards])
        self._transfers = [BulkTransfer(node) for node in self._nodes]
        self._keys = [TensorKeys(job, shard) for shard in range(shards)]

    def take_turn(self, worker: str, seconds: float) -> bool:
        """Return True for one worker in ``seconds`` seconds; it should write its moments."""
        keys = self._keys[0]
        turn = self._nodes[0].set(keys.moments("turn"), worker, nx=True, px=int(seconds * 1000))
        return bool(turn)

    def write(self, moments: Tensor, made: int, rollbacks: int) -> None:
        """Write moments, bfloat16 [n], of an optimizer that made ``made`` steps
        since the training went back ``rollbacks`` times."""
        for transfer, keys, part in zip(
            self._transfers, self._keys, self._parts(moments), strict=True
        ):
            names = self._chunks(keys, len(part))
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
            for transfer, keys, part in zip(
                self._transfers, self._keys, self._parts(moments), strict=True
            ):
                receive(transfer, self._chunks(keys, len(part)), part, split=True, exact=False)
        except (Missing, WrongLength):
            return None
        return moments, int(made)

    def _parts(self, moments: Tensor) -> list[Tensor]:
        parts = Cut(len(moments), len(moments), len(self._nodes)).parts
        return [part.of(moments) for part in parts]

    @staticmethod
    def _chunks(keys: TensorKeys, floats: int) -> list[str]:
        return [keys.moments(name) for name in chunk_names(floats, split=True, exact=False)]


def _is_count(text: bytes) -> bool:
    return text.isdigit() and len(text) <= DIGITS
