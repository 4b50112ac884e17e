"""Length of a job: its subtasks per epoch, and its plan."""

from __future__ import annotations

from typing import Any

import pytest

from vcasgd.errors import SpecError
from vcasgd.learning.length import default_subtasks, plan_for
from vcasgd.spec.job import MAX_SUBTASKS, JobSpec


def spec_of(**fields: Any) -> JobSpec:
    length = {} if {"max_samples", "max_steps"} & fields.keys() else {"epochs": 3}
    return JobSpec.parse({"name": "job", "task": "a:B", "seed": 5, **length, **fields})


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
        (10**12, 64, MAX_SUBTASKS),
    ],
)
def test_default_subtasks_have_some_batches_each(
    samples: int, batch_size: int, subtasks: int
) -> None:
    assert default_subtasks(samples, batch_size) == subtasks


@pytest.mark.parametrize(
    ("push_every", "workers", "rule", "subtasks"),
    [
        (None, 4, "rounds", 58),
        (1, 4, "rounds", 58),
        (20, 4, "rounds", 9),  # of 26 batches each, and a part of one
        (20, 100, "rounds", 58),
        (20, 4, "vc-asgd", 58),
        ("subtask", 4, "rounds", 58),
        (10_000, 4, "rounds", 1),
    ],
)
def test_default_subtasks_have_some_intervals_of_a_round_each(
    push_every: int | str | None, workers: int, rule: str, subtasks: int
) -> None:
    workers_of = {"min": 1, "max": workers}
    spec = spec_of(push_every=push_every, workers=workers_of, update={"rule": rule})

    assert plan_for(spec, 60_000, 256).subtasks_per_epoch == subtasks


@pytest.mark.parametrize(
    ("millions", "workers", "subtasks"),
    [(4, 1, 64), (31, 1, 16), (31, 100, 64), (1000, 2, 8)],
    ids=["small", "large", "many workers", "very large"],
)
def test_subtasks_of_large_models_are_longer(millions: int, workers: int, subtasks: int) -> None:
    spec = spec_of(workers={"min": 1, "max": workers})
    floats = millions * 1_000_000

    assert abs(plan_for(spec, 200_000, 28, floats=floats).subtasks_per_epoch - subtasks) <= 1


@pytest.mark.parametrize(
    ("given", "recorded", "subtasks"), [(None, None, 15), (4, None, 4), (None, 7, 7), (4, 4, 4)]
)
def test_subtasks_are_recorded_or_set_or_chosen(
    given: int | None, recorded: int | None, subtasks: int
) -> None:
    plan = plan_for(spec_of(subtasks_per_epoch=given), 4_000, 64, subtasks=recorded)

    assert plan.subtasks_per_epoch == subtasks
    assert (plan.samples, plan.epochs, plan.seed) == (4_000, 3, 5)


@pytest.mark.parametrize(
    ("fields", "total", "epochs", "subtasks"),
    [
        ({"epochs": 3}, 12_000, 3, 12),
        ({"max_samples": 12_000}, 12_000, 3, 12),
        ({"max_samples": 12_001}, 12_001, 4, 13),
        ({"max_samples": 1}, 1, 1, 1),
        ({"max_samples": 3_999}, 3_999, 1, 4),
        ({"max_steps": 1}, 64, 1, 1),
        ({"max_steps": 63}, 4_032, 2, 5),
        ({"max_steps": 1_000}, 64_000, 16, 64),
    ],
)
def test_the_length_is_in_epochs_samples_or_steps(
    fields: dict[str, Any], total: int, epochs: int, subtasks: int
) -> None:
    plan = plan_for(spec_of(subtasks_per_epoch=4, **fields), 4_000, 64)

    assert plan.total_samples == total
    assert (plan.epochs, plan.total_subtasks) == (epochs, subtasks)


@pytest.mark.parametrize("length", [{"epochs": 1}, {"max_samples": 10}, {"max_steps": 10}])
def test_an_empty_data_set_is_refused(length: dict[str, int]) -> None:
    with pytest.raises(SpecError, match="the training data set is empty"):
        plan_for(spec_of(**length), 0, 64)
