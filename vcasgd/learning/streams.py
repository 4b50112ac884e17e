"""Data that can only be iterated over, as a data set whose samples have numbers.

A sample is its shard and its offset there. Shards are those of the data set: of Hugging Face's
``datasets`` (``num_shards`` and ``shard``), or the parts that it reads according to
``torch.utils.data.get_worker_info``; otherwise all of it is one shard. Each shard of an epoch is
read under random numbers of its own, and from its start, so an offset is the same sample on every
machine. Samples before the wanted ones are read and dropped.
"""

from __future__ import annotations

import copy
import logging
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch.utils.data._utils.worker as torch_worker
from numpy.typing import NDArray
from torch.utils.data import Dataset

from vcasgd.errors import SpecError, UserCodeError
from vcasgd.learning.draws import random_state, restore_random_state, seeded, set_epoch
from vcasgd.learning.sample_content import repeats
from vcasgd.learning.subtasks import SampleOrder

log = logging.getLogger(__name__)

#: Most shards: data sets of more files have several in a shard.
MAX_SHARDS = 1024
#: Iterators that are kept open beyond those of shards that alternate: of the present subtask, and
#: of the next one.
SPARE_ITERATORS = 2
#: Samples that are counted before the worker reports that it goes on.
COUNTED = 1000
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
        self._open: OrderedDict[tuple[int, int], _Shard] = OrderedDict()
        width = max(1, readers)
        self.shards = self._count_shards(width)
        self._width, self._chunk = min(width, self.shards), chunk
        self._layout: StreamLayout | None = None
        self._most = most
        #: True if the shards have no samples after the known ones.
        self._whole = True

    def _count_shards(self, readers: int) -> int:
        """Return the number of shards of the data set, at least 1."""
        known = _num_shards(self._source)
        if known is not None:
            return min(max(known, 1), MAX_SHARDS)
        if readers == 1:
            return 1
        first = _Shard(self._source, readers, 0, 0, self._seed, self._init)
        first.read(1)
        if not first.asked:
            log.warning(
                "the iterable data set doesn't look at get_worker_info, so all of it is one shard; "
                "each of %d loader processes would yield all of it",
                readers,
            )
        return readers if first.asked else 1

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

    def count(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Count the samples in each shard, as many together as are needed.

        Reads all of them unless the data set says its length. Raises :class:`SpecError` if two
        passes over a shard differ.
        """
        if self._layout is not None:
            return
        self._check_repeatable()
        known = _known_lengths(self._source, self.shards)
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

    def _check_repeatable(self) -> None:
        first, second = (self._shard(0, 0).read(COMPARED) for _ in range(2))
        if not repeats(first, second):
            raise SpecError(
                "task: two passes over the iterable data set give different samples, so a sample "
                "has no number",
                remedy="shuffle with a seed (for example, detshuffle of webdataset), and from the "
                "epoch that set_epoch gets",
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
        return [self.layout.first_of(shard) for shard in filled[::step]]

    def set_epoch(self, epoch: int) -> None:
        """Read an epoch, counted from 0, from now on."""
        self._epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples with these numbers, in their order."""
        samples = []
        for start, stop in joined(indices):
            for run in self.layout.runs(start, stop):
                samples += self._read(run.shard, run.offset, run.count)
        return samples

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

    def _shard(self, epoch: int, shard: int) -> _Shard:
        return _Shard(self._source, self.shards, epoch, shard, self._seed, self._init)

    def __getstate__(self) -> dict[str, Any]:
        # Iterators stay in their process.
        return {**self.__dict__, "_open": OrderedDict()}


class _Shard:
    """Iterator over one shard in one epoch, with random numbers of its own."""

    def __init__(
        self,
        source: Any,
        shards: int,
        epoch: int,
        shard: int,
        seed: int,
        init: Callable[[int], None] | None,
    ) -> None:
        self.offset = 0
        words = np.random.SeedSequence([seed, epoch, shard]).generate_state(1, np.uint64)
        with seeded(int(words[0] >> 1)):
            self._random = random_state()
        self._info: Any = None
        if callable(getattr(source, "shard", None)):
            part = source.shard(num_shards=shards, index=shard)
        else:
            # Another iterator may still read another epoch.
            part = copy.copy(source)
            if shards > 1:
                self._info = _Share(shard, shards, int(words[0] >> 1), part)
        set_epoch(part, epoch)
        with self._reading():
            if init is not None and self._info is not None:
                init(shard)
            self._iterator = iter(part)

    def read(self, count: int) -> list[Any]:
        """Return the next samples, ``count`` unless the shard ends."""
        with self._reading():
            samples = list(islice(self._iterator, count))
        self.offset += len(samples)
        return samples

    def skip(self, count: int, on_progress: Callable[[], None] = lambda: None) -> int:
        """Drop the next samples; return how many, ``count`` unless the shard ends."""
        skipped = 0
        while skipped < count:
            wanted = min(COUNTED, count - skipped)
            with self._reading():
                dropped = sum(1 for _ in islice(self._iterator, wanted))
            skipped += dropped
            self.offset += dropped
            on_progress()
            if dropped < wanted:
                break
        return skipped

    @property
    def asked(self) -> bool:
        """True if the data set asked which part of it this process reads."""
        return self._info is not None and self._info.asked

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Use this shard's random numbers, and tell the data set which part of it is read."""
        outer, info = random_state(), torch_worker._worker_info
        restore_random_state(self._random)
        torch_worker._worker_info = self._info
        try:
            yield
        finally:
            self._random = random_state()
            restore_random_state(outer)
            torch_worker._worker_info = info


class _Share:
    """Result of ``get_worker_info`` while a shard is read; see torch's ``WorkerInfo``."""

    rng = None
    worker_method = "multiprocessing"

    def __init__(self, shard: int, shards: int, seed: int, dataset: Any) -> None:
        self._shard, self._shards, self._dataset = shard, shards, dataset
        self.seed = seed
        self.asked = False

    @property
    def dataset(self) -> Any:
        """The data set, of which a function can choose the part that is read."""
        self.asked = True
        return self._dataset

    @property
    def id(self) -> int:
        """Number of the shard."""
        self.asked = True
        return self._shard

    @property
    def num_workers(self) -> int:
        """Number of shards."""
        self.asked = True
        return self._shards


def is_stream(dataset: Any) -> bool:
    """Return True if the samples of a data set can only be iterated over.

    Some iterable ones, such as those of MosaicML streaming, have indices as well.
    """
    get = getattr(type(dataset), "__getitem__", None)
    has_indices = get not in (None, Dataset.__getitem__) and hasattr(dataset, "__len__")
    return hasattr(dataset, "__iter__") and not has_indices


def _num_shards(source: Any) -> int | None:
    known = getattr(source, "num_shards", getattr(source, "n_shards", None))
    return known if isinstance(known, int) and not isinstance(known, bool) else None


def _known_lengths(source: Any, shards: int) -> tuple[int, ...] | None:
    """Return the number of samples in each shard, if the data set knows them."""
    lengths = getattr(source, "shard_lengths", None)
    if lengths is not None:
        return tuple(int(each) for each in lengths)
    if shards > 1:
        return None
    try:
        return (len(source),)
    except (TypeError, NotImplementedError):
        return None


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

    @property
    def samples(self) -> int:
        """Number of samples in an epoch."""
        return self._starts[-1]

    @cached_property
    def _groups(self) -> list[tuple[int, ...]]:
        """The shards that alternate, in the order of an epoch."""
        shards = tuple(range(len(self.lengths)))
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
        number, turn = divmod(shard, self.width)
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
        low, high = 0, start // self.chunk
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self._before(group, middle) <= start else (low, middle - 1)
            )
        return low

    def _before(self, group: Sequence[int], turn: int) -> int:
        """Return the samples of a group before a turn."""
        return sum(min(self.lengths[shard], turn * self.chunk) for shard in group)


def joined(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges ``[start, stop)`` of consecutive numbers in a sequence."""
    start = stop = None
    for index in indices:
        if start is None or index != stop:
            if start is not None and stop is not None:
                yield start, stop
            start = index
        stop = index + 1
    if start is not None and stop is not None:
        yield start, stop
