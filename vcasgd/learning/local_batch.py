"""The local batch of each worker: its part of the job's batch.

With K workers, a step of all of them together trains one batch of the job, as one process would.
Each worker decides by itself, from the facts of the last round: all batches are scaled so that
their sum is the job's batch, and a worker whose local steps last longer than those of the others
takes fewer samples, so that all push at the same time. Losses and models say how small a part
may be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vcasgd.learning.batch_weights import CountedLabels

#: Least samples of a local batch: code that is written for batches may fail with a single sample.
MIN_BATCH = 2
#: The same of a model that normalizes over its batch, whose statistics are noisier in smaller ones.
MIN_NORMALIZED = 16
#: Intervals that are measured before a batch changes for its speed, and at most.
MIN_INTERVALS, MAX_INTERVALS = 3, 5
#: Relative difference between the durations of steps that changes a batch, less is noise; and that
#: which does if it is at least so large, in the same direction, in the most intervals.
DIFFERENCE, STEADY_DIFFERENCE = 0.15, 0.05
#: Factor between durations that noise can't explain if it holds for this many intervals. The
#: batch then changes at once, because all workers wait for a slow one in each round.
CLEAR_DIFFERENCE, CLEAR_INTERVALS = 2.0, 2
#: Most that a batch changes for its speed at a time.
MAX_CHANGE = 4.0


@dataclass(frozen=True)
class Division:
    """Samples that a part of a batch needs at least, and the reason, for people.

    ``labels`` are those by which parts count, None if by samples or by what the task says.
    """

    least: int
    why: str = ""
    labels: CountedLabels | None = None
    #: True if the loss is a sum over samples.
    sums: bool = False
    #: True if a step has gradients that are computed after that of another optimizer.
    in_turn: bool = False

    @property
    def of_whole_loss(self) -> bool:
        """True if the mean loss of parts isn't that of their batch."""
        return self.why.startswith("its loss")


def most_workers(batch_size: int, min_local_batch: int) -> int:
    """Return how many workers can share a batch of so many samples, at least 1."""
    return max(1, batch_size // min_local_batch)


class LocalBatch:
    """Size of one worker's local batch in samples, a mean that needn't be whole.

    ``job_batch`` is the job's batch, ``workers`` the number of workers that it expects, and
    ``least`` the samples that a local batch needs.
    """

    def __init__(self, job_batch: int, workers: int, least: int = MIN_BATCH) -> None:
        self._job_batch = job_batch
        self._least = min(least, job_batch)
        #: Seconds of a sample, because the size also changes with the number of workers.
        self._seconds: deque[float] = deque(maxlen=MAX_INTERVALS)
        self._version: int | None = None
        self._trained = False
        self.size = self._bounded(job_batch / max(workers, 1))

    @property
    def step_seconds(self) -> float:
        """Median duration of a local step of the present size in seconds; 0 if unknown."""
        return median(self._seconds) * self.size if self._seconds else 0.0

    def measure(self, step_seconds: float) -> None:
        """Record the mean duration of the local steps of an interval, in seconds."""
        self._trained = True
        self._seconds.append(step_seconds / self.size)

    def follow(self, version: int, workers: int, total: float, step_seconds: float) -> None:
        """Adapt to the round that made a version of the model; once for each version.

        ``workers`` and ``total`` are the number of its workers and the sum of their batches in
        samples, ``step_seconds`` is how long a step of all would last if none waited for another;
        all 0 if there was no round.
        """
        if version == self._version or workers == 0:
            return
        self._version = version
        if not self._trained:
            # As large as those of the others, which make room once they see this worker in a round:
            # then the batches of all shrink by the same factor, and stay equal.
            self.size = self._bounded(self._job_batch / workers)
            return
        # A worker that is alone trains whole batches, whatever a step takes.
        size = self.size * (self._speed_change(step_seconds) if workers > 1 else 1.0)
        self.size = self._bounded(size * self._job_batch / total if total > 0 else size)

    def _speed_change(self, target: float) -> float:
        """Return the factor that makes a step last ``target`` seconds."""
        if not target or not self._seconds:
            return 1.0
        changes = [target / max(seconds * self.size, 1e-9) for seconds in self._seconds]
        last = changes[-CLEAR_INTERVALS:]
        if len(last) == CLEAR_INTERVALS and max(last) <= 1 / CLEAR_DIFFERENCE:
            change = max(last)
        elif len(last) == CLEAR_INTERVALS and min(last) >= CLEAR_DIFFERENCE:
            change = min(last)
        elif len(changes) >= MIN_INTERVALS:
            change = median(changes)
        else:
            return 1.0
        if abs(change - 1) <= DIFFERENCE and not _steady(changes):
            return 1.0
        # What was measured belongs to the present size.
        self._seconds.clear()
        return min(max(change, 1 / MAX_CHANGE), MAX_CHANGE)

    def _bounded(self, size: float) -> float:
        return float(min(max(size, self._least), self._job_batch))


def _steady(changes: Sequence[float]) -> bool:
    """Return True if the most intervals all ask for a change in the same direction."""
    larger = all(each >= 1 + STEADY_DIFFERENCE for each in changes)
    smaller = all(each <= 1 - STEADY_DIFFERENCE for each in changes)
    return len(changes) == MAX_INTERVALS and (larger or smaller)
