"""Expected number of times that each sample is applied."""

from __future__ import annotations

import numpy as np

from vcasgd.learning.subtasks import EpochPlan


def counts_after(plan: EpochPlan, finished: int) -> list[float]:
    """Return how often each sample is applied after so many finished epochs."""
    if plan.order is not None:
        counts = np.zeros(plan.samples)
        for epoch in range(finished):
            np.add.at(counts, plan.order.indices(epoch, 0, plan.samples), 1)
        return list(counts.tolist())
    counts = np.full(plan.samples, float(min(finished, plan.epochs - 1)))
    if finished == plan.epochs:
        for subtask in range((finished - 1) * plan.subtasks_per_epoch, plan.total_subtasks):
            counts[plan.indices(subtask, 0, plan.size(subtask))] += 1
    expected: list[float] = counts.tolist()
    return expected
