"""Length of a job: its subtasks per epoch, and its plan."""

from __future__ import annotations

from typing import Any

import pytest

from vcasgd.learning.length import default_subtasks, plan_for
from vcasgd.spec.job import MOST_SUBTASKS, JobSpec


def spec_of(**fields: Any) -> JobSpec:
    return JobSpec.parse({"name": "job", "task": "a:B", "epochs": 3, "seed": 5, **fields})


@pytest.mark.parametrize(
    ("samples", "batch_size", "subtasks"),
    [
        (1, 64, 1),
        (64 * 7, 64, 1),
        (64 * 8, 64, 2),
        (4_000, 64, 15),
        (60_000, 64, 64),
        (1_281_167, 256, 64),
        (100_000_000, 64, 7_813),
        (10**12, 64, MOST_SUBTASKS),
    ],
)
def test_default_subtasks_have_some_batches_each(
    samples: int, batch_size: int, subtasks: int
) -> None:
    assert default_subtasks(samples, batch_size) == subtasks


@pytest.mark.parametrize(
    ("fields", "recorded", "subtasks"),
    [
        ({}, None, 15),
        ({"subtasks_per_epoch": 4}, None, 4),
        ({}, 7, 7),
        # Facts of version 0.1.0 contain no number of subtasks.
        ({"subtasks_per_epoch": 4}, 4, 4),
    ],
)
def test_subtasks_are_recorded_or_set_or_chosen(
    fields: dict[str, Any], recorded: int | None, subtasks: int
) -> None:
    plan = plan_for(spec_of(**fields), 4_000, 64, subtasks=recorded)

    assert plan.subtasks_per_epoch == subtasks
    assert (plan.samples, plan.epochs, plan.seed) == (4_000, 3, 5)
