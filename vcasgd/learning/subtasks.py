"""Subtasks of an epoch's seeded order.

Subtasks are numbered from 0 over the whole job: epoch k has the numbers ``[k·S, (k+1)·S)`` with S
subtasks per epoch. Each is a contiguous range of its epoch's order, which every machine computes
from the seed. A job can end within its last epoch, which then has the first samples of its order
only: its last subtask may be shorter, and later ones don't exist.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vcasgd.errors import InvalidUpdate, SpecError
from vcasgd.learning.permutation import CACHED, permuted, shuffled
from vcasgd.task.place import Place

#: Positions of an order that machines compare.
COMPARED_POSITIONS = 1000


class SampleOrder:
    """Order of the samples of each epoch, if it isn't the permutation of the job's seed.

    An epoch may have some samples several times.
    """

    @property
    def samples(self) -> int:
        """Number of samples in an epoch."""
        raise NotImplementedError

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the data set indices of the samples ``[start, stop)`` of an epoch."""
        raise NotImplementedError

    @property
    def is_random(self) -> bool:
        """False if successive samples may be alike, as those of similar length or time."""
        return False

    def ends(self, epoch: int) -> NDArray[np.int64] | None:  # noqa: ARG002 - none by default
        """Return where the batches of an epoch end, int64 [batches], if the order has batches."""
        return None


@dataclass(frozen=True)
class SampleBlocks:
    """Blocks of samples that are cheap to read together, such as the files of a data set.

    ``sizes`` are the samples of each block, in the order of the data set. An epoch's order takes
    the blocks in random order, ``window`` at a time, and permutes the samples of each window. So a
    subtask reads few blocks, and a batch at most those of two windows. Raises :class:`SpecError`
    for an invalid size or window.
    """

    sizes: tuple[int, ...]
    window: int

    def __post_init__(self) -> None:
        if self.window < 1 or any(size < 0 for size in self.sizes):
            raise SpecError(
                "task: blocks of a data set need sizes of at least 0 and a window of at least 1",
                field="task",
            )


@dataclass(frozen=True)
class EpochPlan:
    """Division of ``samples`` into subtasks, for each epoch.

    A subtask has whole batches of ``batch_size`` samples, unless there are more subtasks than
    batches; the last one of an epoch may end with a smaller batch. So one worker trains the batches
    of an ordinary loop over the data. Raises :class:`SpecError` if the numbers are inconsistent.
    """

    samples: int
    subtasks_per_epoch: int
    epochs: int
    seed: int
    #: Blocks of the data set, if any. Only workers need them.
    blocks: SampleBlocks | None = field(default=None, compare=False)
    #: Order of the samples, if it isn't a permutation. Only workers need it.
    order: SampleOrder | None = field(default=None, compare=False)
    #: Samples of the whole job, which end in its last epoch; by default, all of every epoch.
    total_samples: int = field(default=0, kw_only=True)
    batch_size: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if not self.total_samples:
            object.__setattr__(self, "total_samples", self.epochs * self.samples)
        if self.samples < 1:
            raise SpecError("task: the training data set is empty", field="task")
        for name, least in (
            ("subtasks_per_epoch", 1),
            ("epochs", 1),
            ("seed", 0),
            ("batch_size", 1),
        ):
            if getattr(self, name) < least:
                raise SpecError(f"{name}: must be at least {least}", field=name)
        if self.subtasks_per_epoch > self.samples:
            raise SpecError(
                f"subtasks_per_epoch: {self.subtasks_per_epoch} subtasks can't be cut from "
                f"{self.samples} samples",
                remedy=f"set subtasks_per_epoch to at most {self.samples}",
                field="subtasks_per_epoch",
            )
        if not 1 <= self.last_epoch_samples <= self.samples:
            raise SpecError(
                f"max_samples: {self.total_samples} samples don't end in epoch {self.epochs} of "
                f"{self.samples} samples each",
                field="max_samples",
            )
        if self.order is None and self.blocks and sum(self.blocks.sizes) != self.samples:
            raise SpecError(
                f"task: the training set has {self.samples} samples, but its blocks have "
                f"{sum(self.blocks.sizes)}",
                field="task",
            )

    @property
    def total_subtasks(self) -> int:
        """Number of subtasks in the whole job."""
        last = self.epochs - 1
        return last * self.subtasks_per_epoch + self.subtasks_in(last)

    @property
    def last_epoch_samples(self) -> int:
        return self.total_samples - (self.epochs - 1) * self.samples

    def subtasks_in(self, epoch: int) -> int:
        """Return the number of subtasks in an epoch, counted from 0."""
        if epoch < self.epochs - 1:
            return self.subtasks_per_epoch
        # Those that start before the end of the job, rounded up.
        units = -(-self.last_epoch_samples // self._unit)
        return -(-units * self.subtasks_per_epoch // self._units)

    @property
    def _unit(self) -> int:
        """Samples of which subtasks have a multiple."""
        enough = self.subtasks_per_epoch * self.batch_size < self.samples + self.batch_size
        return self.batch_size if enough else 1

    @property
    def _units(self) -> int:
        """Units of an epoch; the last one may be smaller."""
        return -(-self.samples // self._unit)

    def epoch_of(self, subtask: int) -> int:
        """Return the epoch of a subtask, counted from 0."""
        return subtask // self.subtasks_per_epoch

    def bounds(self, subtask: int) -> tuple[int, int]:
        """Return the positions ``[start, stop)`` of a subtask in its epoch's order.

        The sizes of subtasks differ by at most one batch, except that the last one of an epoch and
        that of the job may be shorter.
        Raises :class:`InvalidUpdate` with the reason ``range`` if the job has no such subtask.
        """
        if not 0 <= subtask < self.total_subtasks:
            raise InvalidUpdate(f"there is no subtask {subtask}", reason="range")
        nth = subtask % self.subtasks_per_epoch
        unit, units = self._unit, self._units
        start = nth * units // self.subtasks_per_epoch * unit
        stop = (nth + 1) * units // self.subtasks_per_epoch * unit
        last = self.epoch_of(subtask) == self.epochs - 1
        return start, min(stop, self.last_epoch_samples if last else self.samples)

    def size(self, subtask: int) -> int:
        """Return the samples in a subtask, at least 1. Raises as :meth:`bounds`."""
        start, stop = self.bounds(subtask)
        return stop - start

    def sizes(self, subtasks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return :meth:`size` of existing subtasks, int64 [n]."""
        nth = subtasks % self.subtasks_per_epoch
        width, rest = divmod(self._units, self.subtasks_per_epoch)
        # as in bounds(), but no product exceeds 64 bits
        start = nth * width + nth * rest // self.subtasks_per_epoch
        stop = (nth + 1) * width + (nth + 1) * rest // self.subtasks_per_epoch
        last = subtasks // self.subtasks_per_epoch == self.epochs - 1
        ends = np.where(last, self.last_epoch_samples, self.samples)
        sizes: NDArray[np.int64] = np.minimum(stop * self._unit, ends) - start * self._unit
        return sizes

    def progress(self, subtask: int, position: int) -> float:
        """Return the share, in [0, 1], of the job's samples before a subtask's ``position``.

        Samples count in their order over all epochs. Raises as :meth:`bounds`.
        """
        return self.sample_of(subtask, position) / self.total_samples

    def sample_of(self, subtask: int, position: int) -> int:
        """Return the number of samples before a subtask's ``position``, over all epochs.

        Raises as :meth:`bounds`.
        """
        return self.epoch_of(subtask) * self.samples + self.bounds(subtask)[0] + position

    def place(self, sample: int) -> Place:
        """Return the place of the local step that starts after so many samples of the job."""
        sample = min(sample, self.total_samples - 1)
        epoch, batch = divmod(sample, self.samples)
        batch, steps = batch // self.batch_size, self.epoch_steps(self.samples)
        return Place(
            progress=sample / self.total_samples,
            step=epoch * steps + min(batch, steps - 1),
            steps=(self.epochs - 1) * steps + self.epoch_steps(self.last_epoch_samples),
            epoch=epoch,
            batch=min(batch, steps - 1),
            epoch_steps=steps,
        )

    def epoch_steps(self, samples: int) -> int:
        """Return the steps of an ordinary loop over so many samples."""
        full, rest = divmod(samples, self.batch_size)
        # A single last sample joins the batch before it.
        return max(1, full + (rest > 1 or rest == self.batch_size == 1))

    def indices(self, subtask: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the data set indices of a subtask's samples ``[start, stop)``.

        Samples count from the start of the subtask. The result is int64 ``[stop − start]`` and
        read-only. Raises :class:`InvalidUpdate` with the reason ``range``.
        """
        first, last = self.bounds(subtask)
        if not 0 <= start <= stop <= last - first:
            raise InvalidUpdate(
                f"subtask {subtask} has no samples [{start}, {stop})", reason="range"
            )
        return self._order(self.epoch_of(subtask), first + start, first + stop)

    def order_digest(self) -> str:
        """Return a SHA-256 of the blocks and of the start of the first order, to compare machines.

        The rest of the order depends on the same numbers and code.
        """
        blocks = (self.blocks.sizes, self.blocks.window) if self.blocks else None
        order = self._order(0, 0, min(self.samples, COMPARED_POSITIONS))
        digest = hashlib.sha256(f"{self.samples} {blocks}".encode())
        digest.update(order.astype("<i8", copy=False).tobytes())
        return digest.hexdigest()

    def ends(self, subtask: int, start: int, stop: int) -> list[int] | None:
        """Return where batches of the order end in ``(start, stop)`` of a subtask, and ``stop``.

        None if the order has no batches of its own.
        """
        ends = self.order.ends(self.epoch_of(subtask)) if self.order is not None else None
        if ends is None:
            return None
        first = self.bounds(subtask)[0]
        inside = ends[(ends > first + start) & (ends < first + stop)] - first
        return [*inside.tolist(), stop]

    def whole_batches(self, subtask: int, stop: int) -> int:
        """Return where the batch of the order ends that has the sample before ``stop``."""
        size = self.size(subtask)
        ends = self.ends(subtask, min(stop, size) - 1, size)
        return stop if ends is None else ends[0]

    def _order(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        if self.order is not None:
            return self.order.indices(epoch, start, stop)
        if self.blocks is None:
            return permuted((self.seed, epoch), self.samples, start, stop)
        return _block_order(self.seed, epoch, self.blocks, start, stop)


@dataclass(frozen=True)
class _Windows:
    """The windows of one epoch's order: the blocks of each, and where each window starts."""

    blocks: NDArray[np.int64]
    starts: NDArray[np.int64]
    #: First sample of each block in the data set.
    first: NDArray[np.int64]


@lru_cache(maxsize=CACHED)
def _windows(seed: int, epoch: int, blocks: SampleBlocks) -> _Windows:
    sizes = np.array(blocks.sizes, dtype=np.int64)
    order = shuffled((seed, epoch), len(sizes))
    ends = np.concatenate([[0], np.cumsum(sizes[order])])
    starts = np.append(ends[: -1 : blocks.window], ends[-1])
    return _Windows(order, starts, np.cumsum(sizes) - sizes)


def _block_order(
    seed: int, epoch: int, blocks: SampleBlocks, start: int, stop: int
) -> NDArray[np.int64]:
    """Return positions ``[start, stop)`` of an epoch's order that takes window after window."""
    windows = _windows(seed, epoch, blocks)
    sizes, parts = np.array(blocks.sizes), [np.empty(0, np.int64)]
    number = int(np.searchsorted(windows.starts, start, side="right")) - 1
    while start < stop:
        first, end = int(windows.starts[number]), int(windows.starts[number + 1])
        chosen = windows.blocks[number * blocks.window : (number + 1) * blocks.window]
        last = min(stop, end)
        places = permuted((seed, epoch, number + 1), end - first, start - first, last - first)
        ends = np.cumsum(sizes[chosen])
        which = np.searchsorted(ends, places, side="right")
        parts.append(windows.first[chosen[which]] + places - (ends - sizes[chosen])[which])
        start, number = last, number + 1
    order = np.concatenate(parts)
    order.setflags(write=False)
    return order
