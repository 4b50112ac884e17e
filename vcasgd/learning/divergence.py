"""Divergence of training: which evaluations show it, and the smaller steps after a rollback.

Normal noise and overfitting must not count, because a rollback discards progress. A validation
loss that overfits grows slowly: it stays close to the worst one before. Noise passes: the next
evaluation is good again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Protocol

#: The metric that is checked for large values as well as for NaN and infinity.
LOSS = "loss"
#: A loss this many times larger than the worst one before has diverged.
BLOWN_UP = 10.0
#: A loss this many times larger than the worst one before has diverged if the next one is too. A
#: classifier of ten classes whose loss was 1.3 after its first epoch and whose outputs collapse to
#: a constant has 2.3.
FAR_WORSE = 1.5
#: Divergences without a better model in between that end a job.
MAX_DIVERGENCES = 3
#: Factor of the learning rate for each rollback.
STEP_BACK = 1 / 2


class Measured(Protocol):
    """Result of an evaluation. ``rollbacks`` is the number of rollbacks before its model."""

    @property
    def metrics(self) -> Mapping[str, float]: ...

    @property
    def rollbacks(self) -> int: ...


def divergences(evaluations: Iterable[Measured], metric: str | None) -> list[str | None]:
    """Return for each evaluation, oldest first, how it shows divergence, or None if it doesn't.

    ``metric`` is the name of the metric that ranks the job's models. An evaluation diverged

    - if its ``loss`` is not finite, or ``metric`` is not and was before;
    - if its ``loss`` is more than :data:`BLOWN_UP` times the worst one before it;
    - if its ``loss`` and the previous one are both more than :data:`FAR_WORSE` times the worst
      loss before the two.

    The worst loss is that of all evaluations that did not diverge. The last two rules need losses
    above 0, because factors mean nothing for others.
    """
    history = _History(metric)
    return [history.add(each) for each in evaluations]


class _History:
    """Values of the evaluations that did not diverge, oldest first."""

    def __init__(self, metric: str | None) -> None:
        self._metric = metric
        self._values: list[float] = []
        self._losses: list[float] = []
        #: A far worse loss, if the next evaluation decides about it, and its rollbacks.
        self._doubted: tuple[float, int] | None = None

    def add(self, each: Measured) -> str | None:
        """Return how an evaluation shows divergence, or None."""
        return self._add_loss(each) or self._add_value(each)

    def _add_loss(self, each: Measured) -> str | None:
        doubted, self._doubted = self._doubted, None
        loss = each.metrics.get(LOSS)
        if loss is None:
            return None
        if not isfinite(loss) or self._exceeds(loss, BLOWN_UP):
            return _change(LOSS, self._losses, loss)
        again = doubted is not None and doubted[1] == each.rollbacks
        if self._exceeds(loss, FAR_WORSE):
            self._doubted = loss, each.rollbacks
            return _change(LOSS, self._losses, loss) if again else None
        if doubted is not None and again:
            # It was noise.
            self._losses.append(doubted[0])
        self._losses.append(loss)
        return None

    def _add_value(self, each: Measured) -> str | None:
        value = each.metrics.get(self._metric) if self._metric else None
        if value is None:
            return None
        if isfinite(value):
            self._values.append(value)
            return None
        return _change(self._metric or "", self._values, value) if self._values else None

    def _exceeds(self, loss: float, factor: float) -> bool:
        before = self._losses
        return bool(before) and min(before) > 0 and loss > factor * max(before)


def learning_rate_factor(rollbacks: int) -> float:
    """Return the factor of the learning rate after so many rollbacks, in (0, 1]."""
    return STEP_BACK**rollbacks


def _change(name: str, before: Sequence[float], now: float) -> str:
    return f"{name} {before[-1]:.4g} → {now:.4g}" if before else f"{name} {now:.4g}"
