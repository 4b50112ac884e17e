"""Least part of a batch, the workers that can share it, and labels by which parts count.

All of it is data, so reading it doesn't import torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vcasgd.errors import SpecError, UserCodeError

if TYPE_CHECKING:
    from torch import Tensor

#: Least samples of a local batch: code that is written for batches may fail with a single sample.
MIN_BATCH = 2
#: The same of a model that normalizes over its batch, whose statistics are noisier in smaller ones.
MIN_NORMALIZED = 16


@dataclass(frozen=True)
class Division:
    """Samples that a part of a batch needs at least, and the reason, for people.

    ``labels`` are those by which parts count, None if by samples or by what the task says.
    """

    least: int
    why: str = ""
    labels: CountedLabels | None = None


def most_workers(batch_size: int, min_local_batch: int) -> int:
    """Return how many workers can share a batch of so many samples, at least 1."""
    return max(1, batch_size // min_local_batch)


# -- labels that are counted -----------------------------------------------------------------------

#: Keys and indices that lead to a tensor of a batch.
Path = tuple[str | int, ...]


def _sum(numbers: Tensor) -> Tensor:
    return numbers.float().sum()


#: Ways to count the labels in a tensor, by their names.
COUNTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "other than -100": lambda labels: (labels != -100).sum(),
    "other than -100 after the first column": lambda labels: (labels[..., 1:] != -100).sum(),
    "other than 0": lambda labels: (labels != 0).sum(),
    "other than 0 after the first column": lambda labels: (labels[..., 1:] != 0).sum(),
    "of at least 0": lambda labels: (labels >= 0).sum(),
    "added up": _sum,
}
#: Most tensors of a batch that are searched, and their depth.
MOST_TENSORS, MOST_DEPTH = 64, 4


@dataclass(frozen=True)
class CountedLabels:
    """Numbers of one tensor of a batch, at ``path``, counted in a way of :data:`COUNTS`."""

    path: Path
    counted: str

    def count(self, batch: Any) -> float:
        """Return how many there are. Raises :class:`UserCodeError` for an unlike batch."""
        try:
            for key in self.path:
                batch = batch[key]
            return float(COUNTS[self.counted](batch))
        except Exception as error:
            raise UserCodeError(
                f"a batch has no {self}, unlike the first one",
                remedy="define batch_weight, or set min_local_batch",
            ) from error

    def __str__(self) -> str:
        where = "".join(f"[{key!r}]" for key in self.path)
        return f"numbers {self.counted} in batch{where}"

    def to_json(self) -> str:
        """Return the labels as JSON."""
        return json.dumps([list(self.path), self.counted])

    @classmethod
    def from_json(cls, text: str) -> CountedLabels:
        """Parse JSON, which a worker wrote. Raises :class:`SpecError`."""
        try:
            path, counted = json.loads(text)
            if counted not in COUNTS or not all(type(key) in (str, int) for key in path):
                raise ValueError(text)
            return cls(tuple(path), counted)
        except (TypeError, ValueError) as error:
            raise SpecError(f"a worker reported labels that can't be read: {text[:100]}") from error


def counted_labels(batch: Any) -> Iterator[CountedLabels]:
    """Yield all ways to count numbers of a batch, integers and booleans first."""
    found = list(_tensors(batch, ()))[:MOST_TENSORS]
    whole = [(path, each) for path, each in found if not each.is_floating_point()]
    for path, tensor in (*whole, *(pair for pair in found if pair[1].is_floating_point())):
        for counted in COUNTS:
            if tensor.ndim > ("column" in counted):
                yield CountedLabels(path, counted)


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    import torch  # A caller with a batch has imported torch.

    if isinstance(value, torch.Tensor):
        if not value.is_complex() and value.layout is torch.strided:
            yield path, value
    elif len(path) < MOST_DEPTH:
        pairs: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else ()
        if isinstance(value, list | tuple):
            pairs = enumerate(value)
        for key, each in pairs:
            if type(key) in (str, int):
                yield from _tensors(each, (*path, key))
