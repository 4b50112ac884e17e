"""Order of a sampler: the draws of each epoch, numbered, and the same on every machine.

A sampler is drawn under a seed of the job and the epoch. One that keeps random numbers of its own,
such as a generator, is drawn epoch after epoch from a copy of its first state, so a machine that
joins later draws the same. One with ``set_epoch`` gets the epoch instead.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler

from vcasgd.errors import SpecError, UserCodeError
from vcasgd.learning.subtasks import SampleOrder

#: Epochs whose draws are kept: of the previous, the current, and the next one.
KEPT_EPOCHS = 3
#: Samplers of torch whose draws are independent.
_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class InOrder(SampleOrder):
    """The order of the data set itself, in every epoch."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    @property
    def samples(self) -> int:
        return self._samples

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:  # noqa: ARG002
        return np.arange(start, stop, dtype=np.int64)


@dataclass(frozen=True)
class _Epoch:
    """Draws of one epoch, int64 [samples], and where its batches end, if the sampler says so."""

    indices: NDArray[np.int64]
    ends: NDArray[np.int64] | None


class Draws(SampleOrder):
    """Draws of a sampler, which yields indices, or lists of indices as a batch sampler does.

    Raises :class:`SpecError` for a sampler whose draws can't be repeated, and
    :class:`UserCodeError` if an epoch has another number of draws than the first one, or the
    script changed the sampler.
    """

    def __init__(self, sampler: Any, dataset: Dataset[Any] | None, seed: int) -> None:
        self._original, self._dataset, self._seed = sampler, dataset, seed
        self._jumps = _jumps(sampler)
        self._fingerprint = _fingerprint(sampler)
        #: A copy of the sampler before the draws of epoch ``_next``.
        self._copy: Any = None
        self._next = 0
        self._kept: OrderedDict[int, _Epoch] = OrderedDict()
        self._samples: int | None = None
        self._samples = len(self._epoch(0).indices)

    @property
    def samples(self) -> int:
        assert self._samples is not None, "the first epoch was drawn"
        return self._samples

    @property
    def batch_size(self) -> int | None:
        """Mean number of samples in the batches of the first epoch; None without batches."""
        ends = self._epoch(0).ends
        return None if ends is None else max(1, round(self.samples / len(ends)))

    @property
    def is_random(self) -> bool:
        return type(self._original) in _RANDOM

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        return self._epoch(epoch).indices[start:stop]

    def ends(self, epoch: int) -> NDArray[np.int64] | None:
        return self._epoch(epoch).ends

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._kept:
            self._kept[epoch] = self._draw(epoch)
            while len(self._kept) > KEPT_EPOCHS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(epoch)
        return self._kept[epoch]

    def _draw(self, epoch: int) -> _Epoch:
        if _fingerprint(self._original) != self._fingerprint:
            raise UserCodeError(
                f"{_name(self._original)} was changed while the job trains, so machines would "
                "draw differently",
                remedy="give the sampler set_epoch, and compute its draws from the epoch",
            )
        if self._jumps:
            drawn = self._draw_from(self._original, epoch)
        else:
            if self._copy is None or epoch < self._next:
                self._copy, self._next = _copied(self._original, self._dataset), 0
            while self._next <= epoch:
                drawn = self._draw_from(self._copy, self._next)
                self._next += 1
        if self._samples is not None and len(drawn.indices) != self.samples:
            raise UserCodeError(
                f"{_name(self._original)} has {len(drawn.indices)} draws in epoch {epoch + 1}, and "
                f"{self.samples} in the first one",
                remedy="draw the same number in each epoch, for example by filling up the last "
                "batch",
            )
        return drawn

    def _draw_from(self, sampler: Any, epoch: int) -> _Epoch:
        with seeded(seed_for(self._seed, epoch)):
            set_epoch(sampler, epoch)
            return _drawn(iter(sampler))


def order_of(sampler: Any, dataset: Dataset[Any], seed: int) -> SampleOrder | None:
    """Return the order of a sampler, or None for the seeded permutation of a job.

    A shuffling sampler of all samples has the permutation, and one in order needs no list. Raises
    as :class:`Draws`.
    """
    if type(sampler) is BatchSampler:
        # Batches of equal size are the job's.
        return order_of(sampler.sampler, dataset, seed)
    length = len(dataset)  # type: ignore[arg-type]
    if isinstance(sampler, _InfiniteConstantSampler):
        # An iterable data set with indices, as of MosaicML streaming, has an order of its own.
        return None if getattr(dataset, "shuffle", False) is True else InOrder(length)
    if sampler is None or shuffles_all(sampler, length):
        return None
    if type(sampler) is SequentialSampler or (
        isinstance(sampler, range) and sampler == range(length)
    ):
        return InOrder(length)
    return Draws(sampler, dataset, seed)


def shuffles_all(sampler: Any, length: int) -> bool:
    """Return True if each epoch of a sampler has every sample of a data set once, shuffled."""
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source) == length
    )


def _drawn(draws: Iterator[Any]) -> _Epoch:
    first = list(islice(draws, 1))
    if not first:
        raise SpecError("task: the sampler of the training set draws nothing", field="task")
    if isinstance(first[0], list | tuple):
        batches = [*first, *draws]
        lengths = np.array([len(batch) for batch in batches], dtype=np.int64)
        flat = [index for batch in batches for index in batch]
        return _Epoch(_array(flat), np.cumsum(lengths[lengths > 0]))
    return _Epoch(_array([*first, *draws]), None)


def _array(draws: Iterable[Any]) -> NDArray[np.int64]:
    try:
        indices = np.array([int(each) for each in draws], dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"task: the sampler draws what is no index: {error}",
            remedy="yield whole numbers, or lists of them as batches",
            field="task",
        ) from error
    indices.setflags(write=False)
    return indices


def _jumps(sampler: Any) -> bool:
    """Return True if a sampler's draws depend on nothing but the epoch and global seeds."""
    if any(callable(getattr(part, "set_epoch", None)) for part in wrapped(sampler)):
        return True
    if type(sampler) is range:
        return True
    stateless = type(sampler) in (*_RANDOM, SequentialSampler)
    return stateless and getattr(sampler, "generator", None) is None


def _copied(sampler: Any, dataset: Dataset[Any] | None) -> Any:
    """Copy a sampler, but not the data set that it may refer to."""
    shared = [*wrapped(dataset), getattr(sampler, "data_source", None)]
    try:
        return copy.deepcopy(sampler, {id(each): each for each in shared if each is not None})
    except Exception as error:
        raise SpecError(
            f"task: {_name(sampler)} can't be copied, so its draws can't be repeated on every "
            f"machine: {type(error).__name__}: {error}",
            remedy="give it set_epoch, and compute its draws from the epoch",
            field="task",
        ) from error


def _fingerprint(sampler: Any) -> str:
    """Return a digest of the numbers that a sampler draws by, such as weights."""
    digest = hashlib.sha256()
    if callable(getattr(sampler, "set_epoch", None)):
        return ""
    for name, value in sorted(getattr(sampler, "__dict__", {}).items()):
        if isinstance(value, Tensor | np.ndarray):
            digest.update(name.encode() + np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _name(sampler: Any) -> str:
    return f"the sampler {type(sampler).__name__}"


# -- random numbers and epochs of user code ---------------------------------------------------


def seed_for(seed: int, *place: int) -> int:
    """Return a seed in [0, 2⁶³) for a place of the job, such as a subtask and its position.

    A worker that repeats an interval after an eviction draws the same dropout masks and
    augmentations.
    """
    words = np.random.SeedSequence([seed, *place]).generate_state(1, np.uint64)
    return int(words[0] >> 1)


#: States of the generators of Python, NumPy, and torch.
State = tuple[Any, Any, Tensor]


def set_random_state(seed: int) -> None:
    """Seed all three with a number in [0, 2⁶³)."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state() -> State:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def restore_random_state(state: State) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.default_generator.set_state(state[2])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all three, and restore them afterwards."""
    state = random_state()
    set_random_state(seed)
    try:
        yield
    finally:
        restore_random_state(state)


#: Attributes by which torch's and other libraries' data sets and samplers refer to inner ones.
_INNER = ("dataset", "datasets", "sampler", "batch_sampler", "data_source")


def wrapped(outer: Any) -> Iterator[Any]:
    """Yield an object, and the data sets and samplers in it, such as that of a ``Subset``."""
    waiting, seen = [outer], set[int]()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        inner = getattr(each, "__dict__", {})
        for value in (inner.get(name) for name in _INNER):
            waiting += value if isinstance(value, list | tuple) else [value]


def set_epoch(outer: Any, epoch: int) -> bool:
    """Call ``set_epoch`` of an object and of those in it; return True if there is any."""
    found = [each for each in wrapped(outer) if callable(getattr(each, "set_epoch", None))]
    for each in found:
        each.set_epoch(epoch)
    return bool(found)
