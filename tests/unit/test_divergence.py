"""Divergence: which evaluations and failures show it, and what a job does about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any

import pytest

from vcasgd.controller.jobs.failures import diverged, hopeless, models_before
from vcasgd.errors import Cause
from vcasgd.learning.divergence import divergences, learning_rate_factor
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.job import Evaluation, Failure, JobRecord, JobState
from vcasgd.store.ledger.tuning import Tuned

FIELDS = {"name": "job", "task": "train:Task", "epochs": 99, "subtasks_per_epoch": 1}


@dataclass(frozen=True)
class Result:
    metrics: dict[str, float]
    rollbacks: int = 0


def losses(*values: float) -> list[Result]:
    return [Result({"loss": value}) for value in values]


def evaluated(*values: float, metric: str = "loss", rollbacks: int = 0) -> list[Evaluation]:
    return [
        Evaluation(number, number, {metric: value}, "worker", 1.0, 0.0, epoch=number,
                   rollbacks=rollbacks)
        for number, value in enumerate(values, start=1)
    ]  # fmt: skip


def job_with(evaluations: list[Evaluation], rollbacks: int = 0, **fields: Any) -> JobRecord:
    return JobRecord(
        id="job",
        spec=JobSpec.parse({**FIELDS, **fields}),
        state=JobState.RUNNING,
        package="0" * 64,
        created_at=0.0,
        evaluations=tuple(evaluations),
        tuned=Tuned(rollbacks=rollbacks),
    )


def failed(worker: str, item: str = "train:1", **fields: Any) -> Failure:
    values = {"message": "the loss is nan", "traceback": "", "fault": Cause.WORK, "diverged": True}
    return Failure(worker, item, **{**values, **fields})


# --- evaluations --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "history",
    [
        pytest.param(losses(), id="none"),
        pytest.param(losses(2.3, 1.4, 0.9, 0.7), id="falling"),
        pytest.param(losses(9.0, 0.01, 8.9), id="back at the first one"),
        pytest.param(losses(1.3, 0.9, 3.0, 0.8, 2.9, 0.7), id="single peaks"),
        pytest.param(losses(0.05, 0.02, 0.06, 0.07), id="noise of a low loss"),
        pytest.param(losses(0.3, 0.1, *(0.1 * 1.3**n for n in range(20))), id="overfitting"),
        pytest.param(losses(-1.0, -5.0, 900.0, 900.0), id="a loss that can be negative"),
        pytest.param(losses(0.0, 0.0, 1.0, 1.0), id="a loss of 0"),
        pytest.param(losses(1e12), id="nothing to compare with"),
        pytest.param([Result({"accuracy": 0.9}), Result({"accuracy": 0.1})], id="no loss"),
        pytest.param([Result({"accuracy": 0.9}), Result({"other": nan})], id="another metric"),
        pytest.param([Result({"accuracy": nan})], id="a metric that was never finite"),
    ],
)
def test_noise_and_overfitting_are_no_divergence(history: list[Result]) -> None:
    assert set(divergences(history, "accuracy")) <= {None}


@pytest.mark.parametrize(
    ("history", "shown"),
    [
        pytest.param(losses(nan), {0: "loss nan"}, id="first"),
        pytest.param(losses(2.3, 1.41, nan), {2: "loss 1.41 → nan"}, id="NaN"),
        pytest.param(losses(2.3, 1.41, inf, 1.5), {2: "loss 1.41 → inf"}, id="infinite"),
        pytest.param(losses(2.3, 1.41, 24.0), {2: "loss 1.41 → 24"}, id="blown up"),
        pytest.param(losses(1.3, 0.5, 2.3, 2.3), {3: "loss 0.5 → 2.3"}, id="collapsed"),
        pytest.param(
            losses(1.3, 0.5, 2.3, 2.3, 2.3),
            {3: "loss 0.5 → 2.3", 4: "loss 0.5 → 2.3"},
            id="stays collapsed",
        ),
        pytest.param(
            losses(2.0, 1e9, 1.0, 1e3), {1: "loss 2 → 1e+09", 3: "loss 1 → 1000"}, id="again"
        ),
        pytest.param(
            [Result({"accuracy": 0.9}), Result({"accuracy": nan})],
            {1: "accuracy 0.9 → nan"},
            id="the ranking metric",
        ),
    ],
)
def test_divergence_is_found_in_its_evaluation(
    history: list[Result], shown: dict[int, str]
) -> None:
    found = divergences(history, "accuracy")

    assert {at: how for at, how in enumerate(found) if how is not None} == shown


def test_a_far_worse_model_before_a_rollback_says_nothing_about_the_one_after_it() -> None:
    history = [*losses(1.3, 0.5, 2.3), Result({"loss": 2.3}, 1), Result({"loss": 2.4}, 1)]

    assert divergences(history, "loss") == [None, None, None, None, "loss 0.5 → 2.4"]


def test_the_learning_rate_is_halved_at_each_rollback() -> None:
    assert [learning_rate_factor(each) for each in range(4)] == [1, 0.5, 0.25, 0.125]


# --- a job --------------------------------------------------------------------------------------


def test_evaluations_of_models_before_the_last_rollback_no_longer_count() -> None:
    late = evaluated(1.0, nan)

    assert diverged(job_with(late), [], 1) == "loss 1 → nan in epoch 2"
    assert diverged(job_with(late, rollbacks=1), [], 1) is None


@pytest.mark.parametrize(
    ("failures", "workers", "counts"),
    [
        pytest.param([failed("a")] * 3, 1, True, id="one worker"),
        pytest.param([failed("a"), failed("b"), failed("a")], 2, True, id="two workers"),
        pytest.param([failed("a")] * 3, 2, False, id="one of two workers"),
        pytest.param([failed("a")] * 2, 1, False, id="twice"),
        pytest.param([failed("a", f"train:{n}") for n in range(9)], 1, False, id="different items"),
        pytest.param([failed("a", diverged=False)] * 3, 1, False, id="other errors"),
        pytest.param([failed("a", rollbacks=0)] * 3, 1, True, id="of the present model"),
    ],
)
def test_workers_show_divergence_by_failing_at_the_same_work(
    failures: list[Failure], workers: int, counts: bool
) -> None:
    job = job_with(evaluated(1.0))

    assert diverged(job, failures, workers) == ("the loss is nan" if counts else None)
    assert diverged(replace(job, tuned=Tuned(rollbacks=1)), failures, workers) is None


def test_a_job_goes_back_to_its_best_model_that_did_not_diverge() -> None:
    job = job_with(evaluated(2.0, 1.0, nan, 3.0))

    assert [each.epoch for each in models_before(job)] == [2, 1, 4]


def test_a_job_without_a_ranking_goes_back_to_its_newest_model() -> None:
    job = job_with(evaluated(2.0, 1.0, metric="cost"))

    assert [each.epoch for each in models_before(job)] == [2, 1]


@pytest.mark.parametrize(
    ("rollbacks", "best_after", "fails"),
    [(0, 0, False), (1, 0, False), (2, 0, True), (2, 1, False)],
)
def test_a_job_fails_at_its_third_divergence_without_a_better_model(
    rollbacks: int, best_after: int, fails: bool
) -> None:
    job = job_with(evaluated(1.5, rollbacks=best_after), rollbacks)

    why = hopeless(job, "loss 1.5 → nan in epoch 4", models_before(job))

    assert why == (
        "loss 1.5 → nan in epoch 4; training diverged 3 times since its best model, of epoch 1, "
        "to which it went back, at last with 25% of the learning rate; lower the learning rate or "
        "clip gradients (clip_norm of the task)"
        if fails
        else None
    )


def test_a_job_without_a_usable_evaluation_fails_at_its_first_divergence() -> None:
    why = hopeless(job_with(evaluated(nan)), "loss nan in epoch 1", [])

    assert why is not None
    assert why.startswith("loss nan in epoch 1; training diverged before its first usable eval")
