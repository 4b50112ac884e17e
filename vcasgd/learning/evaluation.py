"""Points of a job's progress at which its model is evaluated, and the end of its improvement."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from vcasgd.learning.subtasks import EpochPlan
from vcasgd.spec.sections import Evaluate


@dataclass(frozen=True)
class EvaluationPoints:
    """Points of a job, each with a number that grows over the job.

    The number is that of finished epochs if each epoch is evaluated, else that of applied samples.
    """

    plan: EpochPlan
    #: Samples between two points, or 0 if progress defines only the last one: the controller adds
    #: points by time. None if the points are the ends of epochs.
    every: int | None

    @property
    def at_epochs(self) -> bool:
        return self.every is None

    @property
    def last(self) -> int:
        """The number of the last point, the end of the job."""
        return self.plan.epochs if self.every is None else self.plan.total_samples

    def reached(self, finished_epochs: int, samples: int) -> int:
        """Return the number of the newest point up to a state of the model, 0 before the first."""
        if self.every is None:
            return finished_epochs
        if samples >= self.plan.total_samples:
            return self.plan.total_samples
        return samples // self.every * self.every if self.every else 0

    def samples_at(self, number: int) -> int:
        """Return the applied samples at a point, at least."""
        samples = number * self.plan.samples if self.every is None else number
        return min(samples, self.plan.total_samples)

    def pin(self, number: int) -> str:
        """Return the name under which the snapshot at a point is pinned."""
        return f"{self._unit}-{number}"

    def number_of(self, pin: str) -> int | None:
        """Return the number of the point that a pin belongs to; None for other pins."""
        unit, _, number = pin.partition("-")
        return int(number) if unit == self._unit and number.isdecimal() else None

    @property
    def _unit(self) -> str:
        return "epoch" if self.every is None else "samples"


def points_for(evaluate: Evaluate, plan: EpochPlan, batch_size: int) -> EvaluationPoints:
    """Return the evaluation points of a job whose steps have ``batch_size`` samples."""
    interval = evaluate.interval
    match interval.unit:
        case "epoch":
            every = None
        case "step":
            every = int(interval.count) * batch_size
        case "sample":
            every = int(interval.count)
        case "second":
            every = 0
    return EvaluationPoints(plan, every)


def without_improvement(qualities: Iterable[float]) -> int:
    """Return how many evaluations, up to the newest one, came after the best one.

    Higher is better, and an equal value is no improvement. Minus infinity, the quality of a value
    that is not finite, is never one, so a job without a finite value doesn't improve at all.
    """
    best, count = -math.inf, 0
    for quality in qualities:
        if quality > best:
            best, count = quality, 0
        else:
            count += 1
    return count
