"""Weights of batches whose losses aren't means over samples: over tokens, or over some labels.

The mean loss of a step is ``Σ wᵢLᵢ / Σ wᵢ`` over its micro-batches and over the workers of a round,
with the weight ``wᵢ`` of each. For losses that are means over samples, it is their number. The
controller reads this, so it imports no torch.
"""

from __future__ import annotations

import json
import math
import re
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
    from vcasgd.task.task import user_code  # A caller with a task has imported torch.

    with user_code("batch_weight"):
        weight = task.batch_weight(batch)
        value = None if weight is None else float(weight)
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
#: Ways to count the labels in a tensor.
_COUNTED = re.compile(r"(other than|of at least) (-?\d+)( after the first column)?|added up")
#: Most tensors of a batch that are searched, and their depth; most classes that have weights.
MAX_TENSORS, MAX_DEPTH, MAX_CLASSES = 64, 4, 4096


@dataclass(frozen=True)
class CountedLabels:
    """Numbers of one tensor of a batch, at ``path``, ``counted`` in a way that is a text.

    ``weights`` are those of their classes, if they have any.
    """

    path: Path
    counted: str
    weights: tuple[float, ...] = ()

    def count(self, batch: Any) -> float:
        """Return how many there are, none if ``collate`` returned None because it left all samples
        out. Raises :class:`UserCodeError` for an unlike batch."""
        if batch is None:
            return 0.0
        try:
            for key in self.path:
                batch = batch[key]
            found = _COUNTED.fullmatch(self.counted)
            assert found is not None, "checked"
            comparison, value, later = found.groups()
            labels = batch[..., 1:] if later else batch
            if comparison is None:
                counted = labels.float()
            else:
                counted = (
                    labels != int(value) if comparison == "other than" else labels >= int(value)
                )
            if self.weights:
                weights = labels.float().new_tensor(self.weights)
                counted = counted * weights[labels.long().clamp(0, len(weights) - 1)]
            return float(counted.sum())
        except Exception as error:
            raise UserCodeError(
                f"a batch has no {self}, unlike the first one",
                remedy="define batch_weight, or set min_local_batch",
            ) from error

    def __str__(self) -> str:
        where = "".join(f"[{key!r}]" for key in self.path)
        by = ", by the weights of their classes" if self.weights else ""
        return f"numbers {self.counted} in batch{where}{by}"

    def to_json(self) -> str:
        weights = [self.weights] if self.weights else []
        return json.dumps([list(self.path), self.counted, *weights])

    @classmethod
    def from_json(cls, text: str) -> CountedLabels:
        """Parse JSON, which a worker wrote. Raises :class:`SpecError`."""
        try:
            path, counted, *rest = json.loads(text)
            weights = rest[0] if rest else ()
            known = _COUNTED.fullmatch(counted) and all(type(key) in (str, int) for key in path)
            if not known or not all(0 <= each < math.inf for each in weights):
                raise ValueError(text)
            return cls(tuple(path), counted, tuple(weights))
        except (TypeError, ValueError) as error:
            raise SpecError(f"a worker reported labels that can't be read: {text[:100]}") from error


#: A label that doesn't count, and weights of classes, if they have any.
Classes = tuple[int, tuple[float, ...]]


def counted_labels(batch: Any, classes: Iterable[Classes] = ()) -> Iterator[CountedLabels]:
    """Yield all ways to count numbers of a batch, integers and booleans first.

    Among them are those that a loss of these ``classes`` may use.
    """
    found = list(_tensors(batch, ()))[:MAX_TENSORS]
    whole = [(path, each) for path, each in found if not each.is_floating_point()]
    usual: list[Classes] = [(-100, ()), (0, ())]
    for path, tensor in (*whole, *(pair for pair in found if pair[1].is_floating_point())):
        given = () if tensor.is_floating_point() else sorted({*classes}.difference(usual))
        for ignored, weights in (*usual, *given):
            yield CountedLabels(path, f"other than {ignored}", weights)
            if tensor.ndim > 1:
                yield CountedLabels(path, f"other than {ignored} after the first column", weights)
        yield CountedLabels(path, "of at least 0")
        yield CountedLabels(path, "added up")


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
