"""A job's vector cut into shards, one for each store node, and what to train where shards differ.

Rules act element by element, so a vector may be cut anywhere. Each shard is a complete thing
with an applied record of its own; after a worker died between two pushes, or after one shard
went back to a checkpoint, shards stand at different places in the same subtask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class ShardRange:
    """One shard: elements ``[start, stop)`` of the job's float32 vector.

    ``parameters`` is the index inside the shard where its running statistics start, ``sent``
    where its frozen parameters do.
    """

    shard: int
    start: int
    stop: int
    parameters: int
    sent: int

    @property
    def floats(self) -> int:
        """Elements in the shard."""
        return self.stop - self.start

    def of(self, vector: Tensor) -> Tensor:
        """The shard of a vector of the whole job, nothing copied."""
        return vector[self.start : self.stop]

    def sent_of(self, vector: Tensor) -> Tensor:
        """What updates carry of it, nothing copied."""
        return vector[self.start : self.start + self.sent]


@dataclass(frozen=True)
class Cut:
    """``floats`` elements, cut evenly into ``shards``. The first ``parameters`` are trained, those
    behind the first ``sent`` are frozen; all are sent unless it is said."""

    floats: int
    parameters: int
    shards: int
    sent: int | None = None

    @cached_property
    def parts(self) -> tuple[ShardRange, ...]:
        """In order; together they are the vector. The lengths of two differ by at most 1."""
        return tuple(self._part(shard) for shard in range(self.shards))

    def _part(self, shard: int) -> ShardRange:
        start, stop = (self.floats * each // self.shards for each in (shard, shard + 1))
        sent = self.floats if self.sent is None else self.sent
        edges = (min(max(edge - start, 0), stop - start) for edge in (self.parameters, sent))
        return ShardRange(shard, start, stop, *edges)


def shards_for(nodes: int, floats: int) -> int:
    """How many store nodes a new job uses: all, but none for an empty shard."""
    return max(1, min(nodes, floats))


@dataclass(frozen=True)
class Step:
    """A push interval: samples ``[start, stop)`` of a subtask, for the shards that lack them."""

    start: int
    stop: int
    shards: tuple[int, ...]


def next_step(positions: Sequence[int], size: int, reach: Callable[[int], int]) -> Step | None:
    """What is to be trained next; None where every shard has the subtask of ``size`` samples.

    ``positions`` are those of all shards, ``reach`` tells up to where a push interval goes that
    starts at a sample. The shards that are behind come first, and no further than to where the
    next one stands: so each shard gets each sample once, and all go on together from there.
    """
    start = min(positions)
    if start >= size:
        return None
    ahead = [each for each in positions if each > start]
    stop = min([reach(start), size, *ahead])
    return Step(start, stop, tuple(k for k, each in enumerate(positions) if each == start))
