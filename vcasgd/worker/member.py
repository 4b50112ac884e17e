"""A worker's part in the rounds of its job: its local batch, intervals, and optimizer's state."""

from __future__ import annotations

from torch.optim import Optimizer

from vcasgd.learning.local_batch import LocalBatch
from vcasgd.learning.local_moments import LocalMoments
from vcasgd.worker.interval import Base

#: Least seconds of an interval of a worker that is alone. No other worker changes the model
#: meanwhile, so it only has to push what it can't afford to lose.
ALONE_SECONDS = 1.0


class Member:
    """Member of the rounds of a job with batches of ``job_batch`` samples.

    ``workers`` is the number of workers that the job expects, and ``steps`` the number of local
    steps in an interval; if it is ``fixed``, also in those of a worker that is alone. The method
    that describes it is in :mod:`vcasgd.learning.rules.rounds`.
    """

    def __init__(self, job_batch: int, workers: int, steps: int, *, fixed: bool = False) -> None:
        self._job_batch = job_batch
        self._batch = LocalBatch(job_batch, workers)
        self._steps = steps
        self._fixed = fixed
        self._alone = False
        self._moments: LocalMoments | None = None

    @property
    def batch(self) -> float:
        """Mean number of samples in the local steps."""
        return self._batch.size

    @property
    def share(self) -> float:
        """The local batch as a share of the job's, in (0, 1]."""
        return min(1.0, self._batch.size / self._job_batch)

    @property
    def step_seconds(self) -> float:
        """Duration of a local step; 0 if unknown."""
        return self._batch.step_seconds

    def follow(self, base: Base) -> None:
        """Adapt to the round that made a base."""
        facts = base.round
        self._alone = facts.workers == 1
        self._batch.follow(base.version, facts.workers, facts.batch, facts.step_seconds)

    def measure(self, step_seconds: float) -> None:
        """Record the mean duration of the local steps of an interval, in seconds."""
        self._batch.measure(step_seconds)

    def use(self, optimizer: Optimizer) -> None:
        """Use a new optimizer."""
        self._moments = LocalMoments(optimizer)

    def begin(self) -> None:
        """Start an interval: from now on, the optimizer's state is that of the whole batch."""
        if self._moments is not None:
            self._moments.share = self.share

    def interval_stop(self, position: int, size: int) -> int:
        """Return where the next interval ends in a subtask of ``size`` samples.

        The rest of a subtask is cut into equal intervals, because the other workers would have to
        wait after a short one.
        """
        left = size - position
        return position + max(1, round(left / max(1, round(left / (self._interval * self.batch)))))

    @property
    def _interval(self) -> float:
        """Local steps of the next interval."""
        if self._fixed or not self._alone or not self.step_seconds:
            return self._steps
        return max(self._steps, ALONE_SECONDS / self.step_seconds)

    def batch_size(self, samples: int) -> int:
        """Return the size of equal batches of an interval with ``samples``."""
        return -(-samples // max(1, round(samples / self.batch)))
