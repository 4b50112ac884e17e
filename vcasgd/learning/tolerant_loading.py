"""Loading of batches without the samples that raise: ``on_bad_sample: skip``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.utils.data import Dataset
from torch.utils.data._utils.pin_memory import pin_memory

from vcasgd.errors import VcasgdError

log = logging.getLogger(__name__)

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class BadSample:
    """A sample of the training set, and why it was skipped."""

    index: int
    why: str


@dataclass(frozen=True)
class FetchedSamples:
    """Samples that could be loaded, with their indices, and those that couldn't."""

    indices: list[int]
    samples: list[Any]
    bad: tuple[BadSample, ...] = ()


@dataclass(frozen=True)
class LoadedBatch:
    """A ``batch`` of the samples at ``indices``; None if every sample of it is ``bad``."""

    batch: Any
    indices: tuple[int, ...]
    bad: tuple[BadSample, ...] = ()

    def pin_memory(self) -> LoadedBatch:
        """Return it in pinned memory, as a ``DataLoader`` asks."""
        return replace(self, batch=pin_memory(self.batch))  # type: ignore[no-untyped-call]


def samples_of(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Return samples of a data set, in one call if it has ``__getitems__``."""
    # As torch's own fetcher does.
    if getattr(dataset, "__getitems__", None):
        return list(dataset.__getitems__(list(indices)))
    return [dataset[index] for index in indices]


def fetched(indices: Sequence[int], load: Callable[[Sequence[int]], list[Any]]) -> FetchedSamples:
    """Load samples together or, if that raises, each on its own.

    ``load`` gets positions in ``indices``. An error of vcasgd, such as that of a storage, is no
    sample's fault, and is raised.
    """
    positions = range(len(indices))
    try:
        return FetchedSamples(list(indices), load(positions))
    except (VcasgdError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - user code
        log.debug("a batch can't be loaded as a whole: %s", error)
    good, samples, bad = [], [], []
    for at in positions:
        try:
            (sample,) = load([at])
        except (VcasgdError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - user code
            bad.append(BadSample(indices[at], described(error)))
        else:
            good.append(indices[at])
            samples.append(sample)
    return FetchedSamples(good, samples, tuple(bad))


def described(error: Exception) -> str:
    """Return an error as short text."""
    return f"{type(error).__name__}: {error}"[:200]


def tolerant(collate: Collate) -> Callable[[FetchedSamples], LoadedBatch]:
    """Return a collate function that leaves out samples which don't go into a batch."""
    return partial(collated, collate)


def collated(collate: Collate, fetched: FetchedSamples) -> LoadedBatch:
    """Return the batch of the largest part of some samples that ``collate`` accepts.

    If it refuses the whole, each sample is added to those before it. If less than half of them go
    together, the first one may be the odd one, and it is tried again from the first that was left.
    """
    if not fetched.samples:
        return LoadedBatch(None, (), fetched.bad)
    batch, refusal = _try(collate, fetched.samples)
    if refusal is None:
        return LoadedBatch(batch, tuple(fetched.indices), fetched.bad)
    everything = range(len(fetched.samples))
    batch, kept = _fitting(collate, fetched.samples, everything)
    left = [at for at in everything if at not in kept]
    if len(kept) < len(left):
        other = _fitting(collate, fetched.samples, left)
        batch, kept = other if len(other[1]) > len(kept) else (batch, kept)
    bad = tuple(
        BadSample(index, f"collate raised {refusal}")
        for at, index in enumerate(fetched.indices)
        if at not in kept
    )
    return LoadedBatch(batch, tuple(fetched.indices[at] for at in kept), (*fetched.bad, *bad))


def _try(collate: Collate, samples: list[Any]) -> tuple[Any, str | None]:
    """Return a batch, or why there is none."""
    try:
        return collate(samples), None
    except (VcasgdError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - user code
        return None, described(error)


def _fitting(collate: Collate, samples: list[Any], order: Sequence[int]) -> tuple[Any, list[int]]:
    """Return a batch of samples that go together, and their positions."""
    kept: list[int] = []
    batch = None
    for at in order:
        larger, refusal = _try(collate, [samples[one] for one in (*kept, at)])
        if refusal is None:
            batch = larger
            kept.append(at)
    return batch, kept


class TolerantDataset(Dataset[Any]):
    """A data set whose batches are :class:`FetchedSamples`."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitems__(self, indices: Sequence[int]) -> FetchedSamples:
        return fetched(indices, lambda at: samples_of(self._dataset, [indices[one] for one in at]))
