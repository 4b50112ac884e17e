"""Length of a job: its subtasks, epochs, and samples, from the job file and facts of the data."""

from __future__ import annotations

from vcasgd.learning.subtasks import EpochPlan, SampleBlocks
from vcasgd.spec.job import MOST_SUBTASKS, JobSpec

#: Subtasks of an epoch by default. A lost machine costs at most one of them, and this many give
#: each of some dozens of workers several per epoch.
SUBTASKS = 64
#: Least batches of a subtask by default: with fewer, leases and pushes cost more than training.
LEAST_BATCHES = 4
#: Most batches of a subtask by default: an epoch of a very large data set has more subtasks.
MOST_BATCHES = 200


def default_subtasks(samples: int, batch_size: int) -> int:
    """Return the subtasks per epoch of a job that sets none, at least 1.

    It depends only on facts that are the same on every machine.
    """
    batches = -(-samples // batch_size)
    wanted = max(SUBTASKS, -(-batches // MOST_BATCHES))
    return max(1, min(wanted, batches // LEAST_BATCHES, MOST_SUBTASKS))


def plan_for(
    spec: JobSpec,
    samples: int,
    batch_size: int,
    *,
    subtasks: int | None = None,
    blocks: SampleBlocks | None = None,
) -> EpochPlan:
    """Return the plan of a job with ``samples`` in its training set.

    ``subtasks`` is the recorded number of subtasks per epoch; None if none is recorded yet.
    Raises :class:`~vcasgd.errors.SpecError` as :class:`EpochPlan` does.
    """
    per_epoch = subtasks or spec.subtasks_per_epoch or default_subtasks(samples, batch_size)
    total = total_samples(spec, samples, batch_size)
    # An empty data set is the plan's error.
    epochs = spec.epochs or -(-total // max(samples, 1))
    return EpochPlan(
        samples, per_epoch, epochs, spec.seed, blocks, total_samples=total, batch_size=batch_size
    )


def total_samples(spec: JobSpec, samples: int, batch_size: int) -> int:
    """Return how many samples a job applies; a sample counts once for each time it is applied.

    ``samples`` are those of an epoch, and a step is one batch of ``batch_size`` samples.
    """
    if spec.max_steps is not None:
        return spec.max_steps * batch_size
    return spec.max_samples or (spec.epochs or 0) * samples
