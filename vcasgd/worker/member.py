"""A worker's part in the rounds of its job: its local batch, and its optimizer's state."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from vcasgd.learning.local_batch import LocalBatch
from vcasgd.learning.local_moments import LocalMoments
from vcasgd.learning.vector import Layout, named_tensors
from vcasgd.worker.interval import Base


class Member:
    """Member of the rounds of a job with batches of ``job_batch`` samples.

    The method that describes it is in :mod:`vcasgd.learning.rules.rounds`.
    """

    def __init__(
        self, job_batch: int, workers: int, layout: Layout, *, complete: bool = True
    ) -> None:
        """``complete``: updates contain the whole difference. A sparse one contains little of its
        own round, and much of earlier ones, so nothing follows from the model's motion, and the
        optimizer's state is that of the local batch.
        """
        self._complete = complete
        self._job_batch = job_batch
        self._layout = layout
        self._batch = LocalBatch(job_batch, workers)
        self._moments: LocalMoments | None = None
        #: The base of the last interval.
        self._last: Base | None = None

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
        """Adapt the local batch to the round that made a base."""
        facts = base.round
        self._batch.follow(base.version, facts.workers, facts.batch, facts.step_seconds)

    def measure(self, step_seconds: float) -> None:
        """Record the mean duration of the local steps of an interval, in seconds."""
        self._batch.measure(step_seconds)

    def use(self, optimizer: Optimizer) -> None:
        """Use a new optimizer."""
        self._moments = LocalMoments(optimizer) if self._complete else None
        self._last = None

    def interval_stop(self, position: int, size: int, steps: int) -> int:
        """Return where an interval of about ``steps`` ends in a subtask of ``size`` samples.

        The rest of a subtask is cut into equal intervals, because the other workers would have to
        wait after a short one.
        """
        left = size - position
        return position + max(1, round(left / max(1, round(left / (steps * self.batch)))))

    def batch_size(self, samples: int) -> int:
        """Return the size of equal batches of an interval with ``samples``."""
        return -(-samples // max(1, round(samples / self.batch)))

    def begin(self, base: Base, model: nn.Module) -> None:
        """Start an interval, with the optimizer's state that follows from the last round.

        If this worker was not in that round, or alone, its state stays as it is.
        """
        if self._moments is None:
            return
        last, facts = self._last, base.round
        if last is not None and facts.workers > 1 and facts.base == last.version:
            motion = named_tensors(self._layout, base.floats - last.floats, base.integers)
            start = named_tensors(self._layout, last.floats, base.integers)
            self._moments.end(
                {
                    parameter: (motion[name], start[name])
                    for name, parameter in model.named_parameters()
                    if name in motion
                }
            )
        self._moments.begin(self.share, facts.samples / self._job_batch)
        # The vector of a base is used again for a later one.
        self._last = replace(base, floats=base.floats.clone()) if self.share < 1 else None
