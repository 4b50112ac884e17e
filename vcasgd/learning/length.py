"""Length of a job: its subtasks, epochs, and samples, from the job file and facts of the data."""

from __future__ import annotations

from vcasgd.learning.shards import SMALL_FLOATS
from vcasgd.learning.subtasks import EpochPlan, SampleBlocks, SampleOrder
from vcasgd.spec.job import MAX_SUBTASKS, JobSpec
from vcasgd.spec.update import RoundsSpec

#: Subtasks of an epoch by default. A lost machine costs at most one of them, and this many give
#: each of some dozens of workers several per epoch.
SUBTASKS = 64
#: Least batches of a subtask by default: with fewer, leases and pushes cost more than training.
MIN_BATCHES = 4
#: Most batches of a subtask by default: an epoch of a very large data set has more subtasks.
MAX_BATCHES = 200
#: Least push intervals of a subtask by default, if each worker has an equal part of the batch.
MIN_INTERVALS = 4
#: Batches of a subtask by default for each million floats that a vector has more than a small one,
#: so that it has several intervals that are as long as an exchange.
BATCHES_PER_MILLION = 16
#: Subtasks of an epoch that each worker should have, however large the vector is.
MIN_SUBTASKS_PER_WORKER = 4


def default_subtasks(samples: int, batch_size: int, min_batches: int = MIN_BATCHES) -> int:
    """Return the subtasks per epoch of a job that sets none, at least 1.

    ``min_batches`` are those of a subtask. It depends only on facts that are the same on every
    machine.
    """
    batches = -(-samples // batch_size)
    wanted = max(SUBTASKS, -(-batches // MAX_BATCHES))
    return max(1, min(wanted, batches // min_batches, MAX_SUBTASKS))


def min_batches(spec: JobSpec, batches: int, floats: int = 0) -> int:
    """Return the least batches of a subtask by default, in an epoch of so many ``batches``.

    Workers of a round cut a subtask into equal intervals. If it has only one or two, the intervals
    of a fast worker and of a slow one differ in length, and each round waits for the longest.
    ``floats`` is the length of the model's vector.
    """
    if not isinstance(spec.update, RoundsSpec):
        return MIN_BATCHES
    if isinstance(spec.push_every, int):
        # In a round, all workers together train one batch in a step.
        return max(MIN_BATCHES, -(-MIN_INTERVALS * spec.push_every // spec.workers.max))
    wanted = BATCHES_PER_MILLION * (floats - SMALL_FLOATS) // 1_000_000
    most = batches // (MIN_SUBTASKS_PER_WORKER * spec.workers.max)
    return max(MIN_BATCHES, min(wanted, most))


def even_subtasks(batches: int, most: int) -> int:
    """Return how many subtasks of an epoch, at most ``most`` and more than half as many, leave the
    fewest batches over.

    Those with one batch more have longer intervals, and the workers of all rounds wait for them.
    """
    return min(range(most, most // 2, -1), key=lambda count: batches % count)


def plan_for(
    spec: JobSpec,
    samples: int,
    batch_size: int,
    *,
    subtasks: int | None = None,
    blocks: SampleBlocks | None = None,
    order: SampleOrder | None = None,
    floats: int = 0,
) -> EpochPlan:
    """Return the plan of a job with ``samples`` in its training set.

    ``subtasks`` is the recorded number of subtasks per epoch; None if none is recorded yet. Only
    then, ``floats``, the length of the model's vector, counts.
    Raises :class:`~vcasgd.errors.SpecError` as :class:`EpochPlan` does.
    """
    least = min_batches(spec, samples // batch_size, floats)
    default = default_subtasks(samples, batch_size, least)
    if isinstance(spec.push_every, int) and least > MIN_BATCHES:
        default = even_subtasks(samples // batch_size, default)
    per_epoch = subtasks or spec.subtasks_per_epoch or default
    total = total_samples(spec, samples, batch_size)
    # An empty data set is the plan's error.
    epochs = spec.epochs or -(-total // max(samples, 1))
    return EpochPlan(
        *(samples, per_epoch, epochs, spec.seed, blocks, order),
        total_samples=total,
        batch_size=batch_size,
    )


def total_samples(spec: JobSpec, samples: int, batch_size: int) -> int:
    """Return how many samples a job applies; a sample counts once for each time it is applied.

    ``samples`` are those of an epoch, and a step is one batch of ``batch_size`` samples.
    """
    if spec.max_steps is not None:
        return spec.max_steps * batch_size
    return spec.max_samples or (spec.epochs or 0) * samples
