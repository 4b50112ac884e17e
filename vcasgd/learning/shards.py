"""Shards of a job's vector, one or more for each store node, and the next interval to train.

Rules act element by element, so a vector can be cut anywhere. Each shard has its own applied
record. If a worker dies between two pushes, or one shard goes back to a checkpoint, shards are at
different positions in the same subtask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from vcasgd.learning.vector import Floats

#: Vectors up to this many floats have short exchanges, and one shard on each node.
SMALL_FLOATS = 4_000_000
#: Least floats of a shard of a longer vector, and most shards of a job on a node: each costs the
#: parameter server some milliseconds for each round.
SHARD_FLOATS, MAX_SHARDS_OF_NODE = 2_000_000, 32


@dataclass(frozen=True)
class ShardRange:
    """One shard: elements ``[start, stop)`` of the job's float32 vector.

    ``parameters`` is the index inside the shard where its running statistics start.
    """

    shard: int
    start: int
    stop: int
    parameters: int

    @property
    def floats(self) -> int:
        """Number of elements in the shard."""
        return self.stop - self.start

    def of(self, vector: Floats) -> Tensor:
        """Return the shard's part of the job's vector, as a view."""
        return vector[self.start : self.stop]

    def pieces(self, most: int) -> Iterator[ShardRange]:
        """Yield its pieces of ``most`` elements; the last one may be shorter."""
        for start in range(self.start, self.stop, most):
            stop = min(start + most, self.stop)
            trained = min(max(self.parameters - (start - self.start), 0), stop - start)
            yield ShardRange(self.shard, start, stop, trained)


@dataclass(frozen=True)
class Cut:
    """An even cut of a vector of ``floats`` elements into ``shards``.

    The first ``parameters`` elements are trained.
    """

    floats: int
    parameters: int
    shards: int

    @cached_property
    def parts(self) -> tuple[ShardRange, ...]:
        """The shards, in order. Their lengths differ by at most 1."""
        return tuple(self._part(shard) for shard in range(self.shards))

    def _part(self, shard: int) -> ShardRange:
        start, stop = (self.floats * each // self.shards for each in (shard, shard + 1))
        return ShardRange(shard, start, stop, min(max(self.parameters - start, 0), stop - start))


def shards_for(nodes: int, floats: int, *, in_turn: bool = False) -> int:
    """Return the number of shards of a new job: one for each node, but no empty shard.

    ``in_turn``: workers exchange shards of a long vector in turn, so each node has several.
    """
    nodes = max(1, min(nodes, floats))
    if not in_turn or floats <= SMALL_FLOATS:
        return nodes
    return nodes * max(1, min(MAX_SHARDS_OF_NODE, floats // (nodes * SHARD_FLOATS)))


@dataclass(frozen=True)
class PushInterval:
    """Samples ``[start, stop)`` of a subtask, for ``shards`` that lack them."""

    start: int
    stop: int
    shards: tuple[int, ...]


def next_interval(
    positions: Sequence[int], size: int, reach: Callable[[int], int]
) -> PushInterval | None:
    """Return the next push interval, or None if every shard has the whole subtask.

    ``positions`` has the position of each shard in the subtask of ``size`` samples. ``reach``
    returns the end of a push interval that starts at a sample. An interval is for the shards that
    are furthest behind, and ends at the position of the next one at the latest. So each shard gets
    each sample once, and from there all shards advance together.
    """
    start = min(positions)
    if start >= size:
        return None
    ahead = [each for each in positions if each > start]
    stop = min([reach(start), size, *ahead])
    return PushInterval(start, stop, tuple(k for k, each in enumerate(positions) if each == start))
