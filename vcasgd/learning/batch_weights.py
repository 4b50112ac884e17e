"""Weights of batches whose losses aren't means over samples: over tokens, or over some labels.

The mean loss of a step is ``Σ wᵢLᵢ / Σ wᵢ`` over its micro-batches and over the workers of a round,
with the weight ``wᵢ`` of each. For losses that are means over samples, it is their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from vcasgd.errors import UserCodeError
from vcasgd.learning.whole_batches import CountedLabels
from vcasgd.task.task import Task, calling_user_code

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
