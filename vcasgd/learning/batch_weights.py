"""Weights of batches whose losses aren't means over samples: over tokens, or over some labels.

The mean loss of a step is ``Σ wᵢLᵢ / Σ wᵢ`` over its micro-batches and over the workers of a round,
with the weight ``wᵢ`` of each. For losses that are means over samples, it is their number. The
controller reads this, so it imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vcasgd.errors import SpecError, UserCodeError

if TYPE_CHECKING:
    from torch import Tensor

    from vcasgd.task.task import Task

#: Function that returns the weight of a batch, at least 0.
Measure = Callable[[Any], float]


def declared_weight(task: Task, batch: Any) -> float | None:
    """Return what the task says about a batch; None if it says nothing.

    Raises :class:`UserCodeError`.
    """
    try:
        weight = task.batch_weight(batch)
        value = None if weight is None else float(weight)
    except Exception as error:
        from vcasgd.task.task import calling_user_code  # A caller with a task has imported torch.

        raise calling_user_code("batch_weight", error) from error
    if value is not None and not 0 <= value < math.inf:
        raise UserCodeError(
            f"batch_weight returned {value}",
            remedy="return how many numbers the loss is the mean of, at least 0",
        )
    return value


class BatchWeights:
    """Weights of the batches of one step, in samples of the weight ``per_sample``."""

    def __init__(self, measure: Measure, per_sample: float) -> None:
        self._measure, self._per_sample = measure, per_sample
        self._first = 0.0
        #: Weight of the present step so far.
        self.step = 0.0

    def begin(self) -> None:
        """Start a step."""
        self._first = self.step = 0.0

    def share(self, batch: Any) -> float:
        """Return the weight of a micro-batch relative to the first one of its step that has any."""
        weight = self._measure(batch) / self._per_sample
        self._first = self._first or weight
        self.step += weight
        return weight / self._first if weight else 0.0

    @property
    def total(self) -> float:
        """Sum of the shares of the step, 0 if it has no weight."""
        return self.step / self._first if self._first else 0.0


def measure_of(task: Task, labels: CountedLabels | None) -> Measure:
    """Return the function that weighs the batches of a task that does so, or by labels."""
    if labels is not None:
        return labels.count

    def measure(batch: Any) -> float:
        weight = declared_weight(task, batch)
        if weight is None:
            raise UserCodeError(
                "batch_weight returned None for one batch, and a number for the first one",
                remedy="return a number for each batch",
            )
        return weight

    return measure


# -- labels that are counted -----------------------------------------------------------------------

#: Keys and indices that lead to a tensor of a batch.
Path = tuple[str | int, ...]


#: Ways to count the labels in a tensor, by their names.
COUNTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "other than -100": lambda labels: (labels != -100).sum(),
    "other than -100 after the first column": lambda labels: (labels[..., 1:] != -100).sum(),
    "other than 0": lambda labels: (labels != 0).sum(),
    "other than 0 after the first column": lambda labels: (labels[..., 1:] != 0).sum(),
    "of at least 0": lambda labels: (labels >= 0).sum(),
    "added up": lambda numbers: numbers.float().sum(),
}
#: Most tensors of a batch that are searched, and their depth.
MAX_TENSORS, MAX_DEPTH = 64, 4


@dataclass(frozen=True)
class CountedLabels:
    """Numbers of one tensor of a batch, at ``path``, counted in a way of :data:`COUNTS`."""

    path: Path
    counted: str

    def count(self, batch: Any) -> float:
        """Return how many there are, none if ``collate`` returned None because it left all samples
        out. Raises :class:`UserCodeError` for an unlike batch."""
        if batch is None:
            return 0.0
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
    found = list(_tensors(batch, ()))[:MAX_TENSORS]
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
    elif len(path) < MAX_DEPTH:
        pairs: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else ()
        if isinstance(value, list | tuple):
            pairs = enumerate(value)
        for key, each in pairs:
            if type(key) in (str, int):
                yield from _tensors(each, (*path, key))
