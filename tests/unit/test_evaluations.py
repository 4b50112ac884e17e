"""Evaluations of a job: which model is the best one, which show divergence, and what follows."""

from __future__ import annotations

from dataclasses import replace
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
Metrics = dict[str, float]


def losses(*values: float) -> list[Metrics]:
    return [{"loss": value} for value in values]


def evaluated(*metrics: Metrics, rollbacks: int = 0) -> list[Evaluation]:
    """Return evaluations with these metrics, of the epochs 1, 2, and so on."""
    return [
        Evaluation(
            number=number,
            version=number,
            metrics=each,
            worker="w",
            seconds=1.0,
            at=0.0,
            epoch=number,
            rollbacks=rollbacks,
        )
        for number, each in enumerate(metrics, start=1)
    ]


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
        pytest.param([{"accuracy": 0.9}, {"accuracy": 0.1}], id="no loss"),
        pytest.param([{"accuracy": 0.9}, {"other": nan}], id="another metric"),
        pytest.param([{"accuracy": nan}], id="a metric that was never finite"),
    ],
)
def test_noise_and_overfitting_are_no_divergence(history: list[Metrics]) -> None:
    assert set(divergences(evaluated(*history), "accuracy")) <= {None}


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
            [{"accuracy": 0.9}, {"accuracy": nan}],
            {1: "accuracy 0.9 → nan"},
            id="the ranking metric",
        ),
    ],
)
def test_divergence_is_found_in_its_evaluation(
    history: list[Metrics], shown: dict[int, str]
) -> None:
    found = divergences(evaluated(*history), "accuracy")

    assert {at: how for at, how in enumerate(found) if how is not None} == shown


def test_a_far_worse_model_before_a_rollback_says_nothing_about_the_one_after_it() -> None:
    history = evaluated(*losses(1.3, 0.5, 2.3)) + evaluated(*losses(2.3, 2.4), rollbacks=1)

    assert divergences(history, "loss") == [None, None, None, None, "loss 0.5 → 2.4"]


def test_the_learning_rate_is_halved_at_each_rollback() -> None:
    assert [learning_rate_factor(each) for each in range(4)] == [1, 0.5, 0.25, 0.125]


# --- a job --------------------------------------------------------------------------------------


def test_evaluations_of_models_before_the_last_rollback_no_longer_count() -> None:
    late = evaluated(*losses(1.0, nan))

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
    job = job_with(evaluated(*losses(1.0)))

    assert diverged(job, failures, workers) == ("the loss is nan" if counts else None)
    assert diverged(replace(job, tuned=Tuned(rollbacks=1)), failures, workers) is None


@pytest.mark.parametrize(
    ("metric", "values", "epochs"),
    [("loss", (2.0, 1.0, nan, 3.0), [2, 1, 4]), ("cost", (2.0, 1.0), [2, 1])],
    ids=["the best first", "no ranking, the newest first"],
)
def test_a_job_goes_back_to_its_best_model_that_did_not_diverge(
    metric: str, values: tuple[float, ...], epochs: list[int]
) -> None:
    job = job_with(evaluated(*({metric: value} for value in values)))

    assert [each.epoch for each in models_before(job)] == epochs


@pytest.mark.parametrize(
    ("rollbacks", "best_after", "fails"),
    [(0, 0, False), (1, 0, False), (2, 0, True), (2, 1, False)],
)
def test_a_job_fails_at_its_third_divergence_without_a_better_model(
    rollbacks: int, best_after: int, fails: bool
) -> None:
    job = job_with(evaluated(*losses(1.5), rollbacks=best_after), rollbacks)

    why = hopeless(job, "loss 1.5 → nan in epoch 4", models_before(job))

    assert why == (
        "loss 1.5 → nan in epoch 4; training diverged 3 times since its best model, of epoch 1, "
        "to which it went back, at last with 25% of the learning rate; lower the learning rate or "
        "clip gradients (clip_norm of the task)"
        if fails
        else None
    )


def test_a_job_without_a_usable_evaluation_fails_at_its_first_divergence() -> None:
    why = hopeless(job_with(evaluated(*losses(nan))), "loss nan in epoch 1", [])

    assert why is not None
    assert why.startswith("loss nan in epoch 1; training diverged before its first usable eval")


# --- the best model -----------------------------------------------------------------------------


def named(name: str, mode: str) -> dict[str, Any]:
    return {"metric": {"name": name, "mode": mode}}


def perplexities(*values: float) -> list[dict[str, float]]:
    return [{"accuracy": 0.1 * value, "perplexity": value} for value in values]


@pytest.mark.parametrize(
    ("stop", "evaluations", "metric", "epoch"),
    [
        ({}, losses(4.0, 3.0, 2.5), "loss", 3),
        ({}, losses(4.0, 2.5, 3.0), "loss", 2),
        ({}, losses(2.5, 2.5), "loss", 1),
        ({}, losses(nan, 3.0, -inf), "loss", 2),
        ({}, [{"accuracy": 0.5, "loss": 1.0}, {"accuracy": 0.4, "loss": 0.1}], "accuracy", 1),
        ({}, [{"accuracy": 0.0}, {"accuracy": 0.1}], "accuracy", 2),
        ({}, [{"perplexity": 3.0}, {"perplexity": 9.0}], "perplexity", 1),
        ({}, [{"f1": 0.3}, {"f1": 0.9}], "f1", 2),
        # Whether higher is better isn't known: the last epoch counts as the best one.
        ({}, [{"tokens": 3.0}, {"tokens": 9.0}], None, 2),
        ({}, losses(nan, nan), "loss", 2),
        ({}, [], None, None),
        (named("perplexity", "min"), perplexities(5.0, 3.0, 7.0), "perplexity", 2),
        (named("perplexity", "max"), perplexities(5.0, 3.0, 7.0), "perplexity", 3),
        # Only evaluations with the named metric are candidates, if there are any.
        (named("f1", "max"), [{"accuracy": 0.9}, {"f1": 0.2}, {"f1": 0.1}], "f1", 2),
        (named("f1", "max"), [{"accuracy": 0.9}, {"accuracy": 0.1}], None, 2),
    ],
)
def test_best_epoch_is_that_of_the_named_or_a_default_metric(
    stop: dict[str, Any],
    evaluations: list[dict[str, float]],
    metric: str | None,
    epoch: int | None,
) -> None:
    job = job_with(evaluated(*evaluations), stop=stop)

    assert (job.metric.name if job.metric else None) == metric
    assert job.best == (job.evaluations[epoch - 1] if epoch else None)


@pytest.mark.parametrize(
    ("stop", "evaluations", "count"),
    [
        ({}, [], 0),
        ({}, losses(2.0), 0),
        ({}, losses(2.0, 1.0), 0),
        ({}, losses(2.0, 3.0), 1),
        ({}, losses(2.0, 2.0, 3.0), 2),
        ({}, losses(2.0, 3.0, 1.0, 4.0), 1),
        ({}, losses(2.0, nan, inf, -inf), 3),
        ({}, losses(nan, nan), 2),
        ({}, losses(nan, 2.0), 0),
        ({}, [{"tokens": 2.0}, {"tokens": 3.0}], 0),
        ({"accuracy": 0.9}, [{"accuracy": 0.5}, {"accuracy": 0.4}, {"accuracy": 0.5}], 2),
        (named("f1", "max"), [{"f1": 1.0}, {"loss": 0.0}, {"f1": 0.5}], 1),
        (named("f1", "min"), [{"f1": 1.0}, {"f1": 0.5}], 0),
    ],
)
def test_evaluations_without_improvement_are_counted(
    stop: dict[str, Any], evaluations: list[dict[str, float]], count: int
) -> None:
    assert job_with(evaluated(*evaluations), stop=stop).without_improvement == count
