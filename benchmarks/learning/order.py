"""The seeded order of samples, the only part of vcasgd in the plain loop."""

from __future__ import annotations

from vcasgd.learning.subtasks import EpochPlan


def order(samples: int, seed: int, epoch: int) -> list[int]:
    """Return the indices of all samples in the order of an epoch, counted from 1."""
    plan = EpochPlan(samples, 1, epoch, seed)
    return plan.indices(epoch - 1, 0, samples).tolist()
