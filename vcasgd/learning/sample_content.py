"""Content of a few samples of a data set, to find machines on which an index names another sample.

Honest machines may differ in their decoders, processors, and libraries, so numbers are compared
coarsely, and only parts of a sample that are the same each time it is read:

- integers, booleans, text, and bytes exactly, of paths only the last part;
- floats and images (``uint8``) by their shape and the means of :data:`SEGMENTS` segments, within
  :data:`TOLERANCE`.

Each sample is read twice with different random numbers. Augmented parts then differ and are left
out. Samples that can't be read, or take too long, are left out, too. A data set with the attribute
``content_digest``, such as :class:`vcasgd.data.ShardedDataset`, is compared by that alone.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from vcasgd.errors import Cause, VcasgdError, fault_of
from vcasgd.learning.draws import random_state, restore_random_state, set_random_state
from vcasgd.learning.loader_processes import LoaderProcesses, Request, workers_of
from vcasgd.task.task import Task

#: Samples that are compared, evenly spread, the first and the last one among them. Of two classes
#: in another order, about half of the samples still agree by chance.
SAMPLES = 16
#: Seconds after which no further sample is read: a slow data set delays a worker's start by little.
SECONDS = 5.0
#: Parts of a sample that are compared, and the means of each array.
MAX_PARTS, SEGMENTS = 16, 8
#: Difference between honest machines, relative to a mean and to the root mean square of the array.
#: Decoders of JPEG differ by about 1 of 256 levels in a pixel, and by much less in a mean.
TOLERANCE = 0.02
#: Part of the compared samples that may differ. In another order nearly all do; a single one may
#: contain what is specific to a machine.
MAX_DIFFERING = 0.25

#: Parts of a sample: where each is in it, a description to compare exactly, and means.
Parts = dict[str, tuple[str, list[float]]]


@dataclass(frozen=True)
class SampleContent:
    """Content of a data set to compare: the parts of samples by index, or else a digest."""

    samples: Mapping[int, Parts] = field(default_factory=dict)
    digest: str = ""

    @classmethod
    def of(cls, task: Task, dataset: Dataset[Any], length: int) -> SampleContent:
        """Read the content of a data set of ``length``.

        Random numbers of this process stay as they are. Raises errors of the store.
        """
        digest = getattr(dataset, "content_digest", None)
        if isinstance(digest, str):
            return cls(digest=digest)
        samples = {}
        with _reader(task, dataset) as read:
            until = time.monotonic() + SECONDS
            for index in getattr(dataset, "compared", None) or _spread(length):
                if time.monotonic() > until:
                    break
                try:
                    samples[index] = _stable(parts_of(read(index, 1)), parts_of(read(index, 2)))
                except VcasgdError as error:
                    if fault_of(error) is Cause.STORE:
                        raise
                except Exception:  # noqa: BLE001 - The user's code; training reports it.
                    continue
        return cls({index: parts for index, parts in samples.items() if parts})

    def to_json(self) -> str:
        """Return the content as text, for :meth:`from_json`."""
        return json.dumps({"digest": self.digest, "samples": self.samples})

    @classmethod
    def from_json(cls, text: str) -> SampleContent:
        """Parse a text that a worker wrote. What can't be read is left out."""
        try:
            values = json.loads(text or "{}")
            samples = {
                int(index): {
                    str(place): (str(exact), [float(each) for each in means])
                    for place, (exact, means) in parts.items()
                }
                for index, parts in values.get("samples", {}).items()
            }
            return cls(samples, str(values.get("digest", "")))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return cls()

    def difference(self, first: SampleContent) -> str | None:
        """Return how this data set differs from the ``first`` machine's, or None."""
        if self.digest and first.digest and self.digest != first.digest:
            return "the index has another content"
        both = sorted(self.samples.keys() & first.samples.keys())
        wrong = [each for each in both if not _alike(self.samples[each], first.samples[each])]
        if len(wrong) <= MAX_DIFFERING * len(both):
            return None
        return f"{len(wrong)} of {len(both)} compared samples differ, for example sample {wrong[0]}"


def repeats(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return True if two readings of samples in order are of the same ones.

    Augmentation may change parts of them. Then a part that isn't the same in all samples, such as a
    label, has to agree.
    """
    mine, its = [parts_of(each) for each in first], [parts_of(each) for each in second]
    if [each.keys() for each in mine] != [each.keys() for each in its]:
        return False
    places = {place for parts in mine for place in parts}
    stable = {
        place
        for place in places
        if all(_same(a[place], b[place]) for a, b in zip(mine, its, strict=True) if place in a)
    }
    varied = {place for place in stable if len({str(parts.get(place)) for parts in mine}) > 1}
    return stable == places or bool(varied)


def parts_of(sample: Any) -> Parts:
    """Return the parts of a sample: what is in its tuples, lists, and mappings."""
    parts: Parts = {}
    for place, value in _leaves(sample, ""):
        if len(parts) == MAX_PARTS:
            break
        parts[place] = _describe(value)
    return parts


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{place}.{key}")
    elif isinstance(value, tuple | list):
        if len(value) > MAX_PARTS and all(isinstance(each, int | float) for each in value):
            # Long lists of numbers, such as tokens, are one part.
            yield place, np.asarray(value)
            return
        for number, each in enumerate(value):
            yield from _leaves(each, f"{place}.{number}")
    else:
        yield place, value


def _describe(value: Any) -> tuple[str, list[float]]:
    if isinstance(value, str):
        return _digest(value.rpartition("/")[2].encode()), []
    if isinstance(value, bytes):
        return _digest(value), []
    if isinstance(value, Tensor):
        dense = value.detach().cpu()
        value = (dense.to_dense() if dense.is_sparse else dense).resolve_conj()
        value = value.float().numpy() if value.is_floating_point() else value.numpy()
    array = np.asarray(value)  # also of images of PIL
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag])
    if array.dtype.kind == "f" or array.dtype == np.uint8:
        return f"{array.dtype.kind}{array.shape}", _means(array.astype(np.float64).ravel())
    if array.dtype.kind in "biu":
        return _digest(str(array.shape).encode() + array.astype("<i8").tobytes()), []
    return type(value).__name__, []


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _means(numbers: NDArray[np.float64]) -> list[float]:
    """Return the means of the segments, and the root mean square. Empty without finite numbers."""
    if not numbers.size or not np.isfinite(numbers).all():
        return []
    means = [part.mean() for part in np.array_split(numbers, min(SEGMENTS, numbers.size))]
    return [float(f"{each:.4g}") for each in (*means, np.sqrt(np.square(numbers).mean()))]


def _same(one: tuple[str, Sequence[float]], other: tuple[str, Sequence[float]]) -> bool:
    (exact, means), (other_exact, others) = one, other
    if exact != other_exact or len(means) != len(others):
        return False
    size = max((*means[-1:], *others[-1:]), default=0.0)
    return all(
        abs(mine - its) <= TOLERANCE * (max(abs(mine), abs(its)) + size)
        for mine, its in zip(means, others, strict=True)
    )


def _stable(once: Parts, again: Parts) -> Parts:
    """Return the parts that are the same in both readings of a sample."""
    return {
        place: part for place, part in once.items() if place in again and _same(part, again[place])
    }


def _alike(mine: Parts, first: Parts) -> bool:
    return all(_same(mine[place], first[place]) for place in mine.keys() & first.keys())


def _spread(length: int) -> list[int]:
    """Return evenly spread indices, the first and the last one before the others."""
    indices = np.unique(np.linspace(0, length - 1, min(SAMPLES, length)).round().astype(int))
    return [int(each) for each in (*indices[:1], *indices[:0:-1])]


@contextmanager
def _reader(task: Task, dataset: Dataset[Any]) -> Iterator[Any]:
    """Return a function that reads a sample with a seed as training does: in the same process.

    What a data set opens in this process must not be inherited by its loader processes.
    """
    if workers_of(task):
        one: Any = SimpleNamespace(
            loader_workers=1,
            prefetch_factor=1,
            pin_memory=False,
            worker_init_fn=task.worker_init_fn,
            collate=_only,
        )
        processes = LoaderProcesses(one, dataset, "cpu")
        try:
            yield lambda index, seed: next(processes.load([Request([index], seed)]))
        finally:
            processes.close()
        return
    data: Any = dataset
    state = random_state()

    def read(index: int, seed: int) -> Any:
        set_random_state(seed)
        return data.__getitems__([index])[0] if hasattr(data, "__getitems__") else data[index]

    try:
        yield read
    finally:
        restore_random_state(state)


def _only(samples: list[Any]) -> Any:
    return samples[0]
