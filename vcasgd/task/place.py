"""A local step's place in the job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Place of a local step, counted in steps of the job's whole batch.

    It is that of the step's samples in the order over all epochs, so it doesn't depend on which
    worker makes the step, or when. Workers share a batch: several of their steps have the same
    place. If each makes the steps of the whole batch, it follows what the model contains instead.
    """

    #: Share of the job's samples before the step, in [0, 1).
    progress: float
    #: Steps before it, and those of the job.
    step: int = 0
    steps: int = 1
    epoch: int = 0
    #: Steps of the epoch before it, and those of a whole epoch.
    batch: int = 0
    epoch_steps: int = 1
