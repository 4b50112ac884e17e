"""Data that can only be iterated over, as a data set whose samples have numbers.

A sample is its shard and its offset there. A shard is read from its start, so an offset is the same
sample on every machine. Samples before the wanted ones are read and dropped. If the data set is
shuffled, its shards come in another order in each epoch.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from vcasgd.errors import SpecError, UserCodeError
from vcasgd.learning.permutation import shuffled
from vcasgd.learning.sample_content import repeats
from vcasgd.learning.stream_shards import (
    StreamShard,
    count_shards,
    known_lengths,
    shuffles_files,
)
from vcasgd.learning.subtasks import SampleOrder

log = logging.getLogger(__name__)

#: Iterators that are kept open beyond those of shards that alternate: of the present subtask, and
#: of the next one.
SPARE_ITERATORS = 2
#: First samples of a shard that are compared with those of a second pass.
COMPARED = 16
#: More samples than there are.
UNBOUNDED = 2**62


class Stream(Dataset[Any], SampleOrder):
    """Map-style data set over an iterable one, for one reading thread.

    ``readers`` is the number of processes that the script's loader has, of which each reads a shard
    of data sets that ask ``get_worker_info``; ``chunk`` is the number of samples that they take in
    turn. ``most`` is the number of samples that are needed, if not all are. It has a length after
    :meth:`count` or :meth:`use`. Reads raise :class:`UserCodeError` if an epoch has another number
    of samples, besides what the data set raises.
    """

    #: Loader processes read it otherwise.
    is_stream = True

    def __init__(
        self,
        source: Any,
        *,
        seed: int,
        readers: int = 1,
        chunk: int = 1,
        init: Callable[[int], None] | None = None,
        most: int | None = None,
    ) -> None:
        self._source, self._seed, self._init = source, seed, init
        self._epoch = 0
        self._open: OrderedDict[tuple[int, int], StreamShard] = OrderedDict()
        width = max(1, readers)
        self.shards = count_shards(source, width, seed, init)
        self._width, self._chunk = min(width, self.shards), chunk
        self._layout: StreamLayout | None = None
        self._most = most
        #: The shards in the present epoch.
        self._present: tuple[int, StreamLayout] | None = None
        #: True if the shards have no samples after the known ones.
        self._whole = True
        #: Samples of the last batch, by number: a step that failed reads parts of it again.
        self._last: dict[int, Any] = {}

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of samples in each shard."""
        return self.layout.lengths

    @property
    def layout(self) -> StreamLayout:
        """The numbers of the samples."""
        if self._layout is None:
            self.count()
        assert self._layout is not None, "it was counted"
        return self._layout

    def use(self, lengths: Sequence[int]) -> None:
        """Use the numbers of samples in the shards."""
        self._whole = self._most is None or sum(lengths) < self._most
        self._layout = StreamLayout(tuple(lengths), self._width, self._chunk)
        self._present = None

    def count(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Count the samples in each shard, as many together as are needed.

        Reads all of them unless the data set says its length. Raises :class:`SpecError` if two
        passes over a shard differ.
        """
        if self._layout is not None:
            return
        self._check_repeatable()
        known = known_lengths(self._source, self.shards)
        if known is not None:
            self.use(known)
            return
        counts, started, most = [0] * self.shards, time.monotonic(), self._most
        for first in range(0, self.shards, self._width):
            group = range(first, min(first + self._width, self.shards))
            open_shards = {shard: self._shard(0, shard) for shard in group}
            while open_shards and (left := (most or UNBOUNDED) - sum(counts)) > 0:
                share = -(-left // len(open_shards)) if most else UNBOUNDED
                for shard, iterator in list(open_shards.items()):
                    wanted = min(share, left)
                    counted = iterator.skip(wanted, on_progress)
                    counts[shard] += counted
                    left -= counted
                    if counted < wanted:
                        del open_shards[shard]
        log.info("counted %d samples in %.0f s", sum(counts), time.monotonic() - started)
        self.use(counts)

    def _layout_of(self, epoch: int) -> StreamLayout:
        if self._present is None or self._present[0] != epoch:
            layout = self.layout
            if self._shuffled:
                order = shuffled((self._seed, epoch), self.shards).tolist()
                layout = replace(layout, order=tuple(order))
            self._present = epoch, layout
        return self._present[1]

    @cached_property
    def _shuffled(self) -> bool:
        """True if the shards come in another order in each epoch: their samples do."""
        if self.shards == 1 or not self._whole:
            return False
        first, later = (self._shard(epoch, 0).read(COMPARED) for epoch in range(2))
        return shuffles_files(self._source) or not repeats(first, later)

    def _check_repeatable(self) -> None:
        first, second = (self._shard(0, 0).read(COMPARED) for _ in range(2))
        if not repeats(first, second):
            raise SpecError(
                "task: two passes over the iterable data set give different samples, so a sample "
                "has no number",
                remedy="shuffle with the global random numbers of Python, NumPy, or torch, or with "
                "a seed and the epoch that set_epoch gets. A job can't train on data that its own "
                "training makes, such as a replay buffer",
                field="task",
            )

    def __len__(self) -> int:
        return self.samples

    @property
    def samples(self) -> int:
        return self.layout.samples

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:  # noqa: ARG002 - in order
        return np.arange(start, stop, dtype=np.int64)

    @property
    def compared(self) -> list[int]:
        """Numbers of samples that machines compare, which are cheap to read: the first ones of
        shards, and of a single shard its first ones."""
        filled = [shard for shard, length in enumerate(self.lengths) if length]
        if len(filled) == 1:
            return list(range(min(COMPARED, len(self))))
        step = -(-len(filled) // COMPARED)
        return [self._layout_of(0).first_of(shard) for shard in filled[::step]]

    def set_epoch(self, epoch: int) -> None:
        """Read an epoch, counted from 0, from now on."""
        if epoch != self._epoch:
            self._epoch, self._last = epoch, {}

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples with these numbers, in their order."""
        if not all(index in self._last for index in indices):
            samples = []
            for start, stop in joined(indices):
                for run in self._layout_of(self._epoch).runs(start, stop):
                    samples += self._read(run.shard, run.offset, run.count)
            self._last = dict(zip(indices, samples, strict=True))
        return [self._last[index] for index in indices]

    def _read(self, shard: int, offset: int, count: int) -> list[Any]:
        iterator = self._open.pop((self._epoch, shard), None)
        if iterator is None or iterator.offset > offset:
            iterator = self._shard(self._epoch, shard)
        self._open[self._epoch, shard] = iterator
        while len(self._open) > self._width + SPARE_ITERATORS:
            self._open.popitem(last=False)
        iterator.skip(offset - iterator.offset)
        samples = iterator.read(count)
        length = self.lengths[shard]
        if len(samples) < count:
            raise _other_length(iterator.offset, length, self._epoch)
        if iterator.offset == length and self._whole:
            del self._open[self._epoch, shard]
            if iterator.skip(1):
                raise _other_length(None, length, self._epoch)
        return samples

    def _shard(self, epoch: int, shard: int) -> StreamShard:
        return StreamShard(self._source, self.shards, epoch, shard, self._seed, self._init)

    def __getstate__(self) -> dict[str, Any]:
        # Iterators stay in their process.
        return {**self.__dict__, "_open": OrderedDict()}


def _other_length(found: int | None, length: int, epoch: int) -> UserCodeError:
    what = "more" if found is None else str(found)
    return UserCodeError(
        f"the iterable data set has {what} samples instead of {length} in epoch {epoch + 1}",
        remedy="correct its __len__, which is the number of samples, and yield the same number in "
        "each epoch",
    )


# -- numbers of samples --------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Samples ``[offset, offset + count)`` of a shard."""

    shard: int
    offset: int
    count: int


@dataclass(frozen=True)
class StreamLayout:
    """The samples of each shard, and how shards alternate."""

    lengths: tuple[int, ...]
    width: int = 1
    chunk: int = 1
    #: The shards in the order of an epoch; empty if that is their own.
    order: tuple[int, ...] = ()

    @property
    def samples(self) -> int:
        """Number of samples in an epoch."""
        return self._starts[-1]

    @cached_property
    def _groups(self) -> list[tuple[int, ...]]:
        """The shards that alternate, in the order of an epoch."""
        shards = self.order or tuple(range(len(self.lengths)))
        return [shards[first : first + self.width] for first in range(0, len(shards), self.width)]

    @cached_property
    def _starts(self) -> list[int]:
        sizes = (sum(self.lengths[shard] for shard in group) for group in self._groups)
        return [0, *accumulate(sizes)]

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Yield where the samples ``[start, stop)`` of an epoch are, in their order."""
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            end = min(stop, self._starts[number + 1])
            first = self._starts[number]
            yield from self._runs_of(self._groups[number], start - first, end - first)
            start = end

    def first_of(self, shard: int) -> int:
        """Return the number of a shard's first sample, which has at least one."""
        place = self.order.index(shard) if self.order else shard
        number, turn = divmod(place, self.width)
        before = self._groups[number][:turn]
        return self._starts[number] + sum(min(self.chunk, self.lengths[each]) for each in before)

    def _runs_of(self, group: Sequence[int], start: int, stop: int) -> Iterator[Run]:
        if len(group) == 1:
            yield Run(group[0], start, stop - start)
            return
        turn = self._turn(group, start)
        place = self._before(group, turn)
        while place < stop:
            for shard in group:
                offset = turn * self.chunk
                count = min(self.chunk, self.lengths[shard] - offset)
                first, last = max(start - place, 0), min(count, stop - place)
                if first < last:
                    yield Run(shard, offset + first, last - first)
                place += max(count, 0)
            turn += 1

    def _turn(self, group: Sequence[int], start: int) -> int:
        """Return the turn, counted from 0, in which a group comes to its sample ``start``."""
        turns = range(start // self.chunk + 1)
        return bisect_right(turns, start, key=lambda turn: self._before(group, turn)) - 1

    def _before(self, group: Sequence[int], turn: int) -> int:
        return sum(min(self.lengths[shard], turn * self.chunk) for shard in group)


def joined(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges ``[start, stop)`` of consecutive numbers in a sequence."""
    numbers = np.array(indices, dtype=np.int64)
    for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
        if len(run):
            yield int(run[0]), int(run[-1]) + 1
