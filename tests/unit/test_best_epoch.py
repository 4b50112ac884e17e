"""The best model of a job, by the metric that its specification names or by a default one."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.job import Evaluation, JobRecord, JobState

FIELDS = {"name": "job", "task": "train:Task", "epochs": 9, "subtasks_per_epoch": 1}


def job_with(stop: dict[str, Any], evaluations: list[dict[str, float]]) -> JobRecord:
    """A job with one evaluation per element, for the epochs 1, 2, … in this order."""
    return JobRecord(
        id="job",
        spec=JobSpec.parse({**FIELDS, "stop": stop}),
        state=JobState.RUNNING,
        package="0" * 64,
        created_at=0.0,
        evaluations=tuple(
            Evaluation(epoch, epoch, metrics, "worker", 1.0, 0.0)
            for epoch, metrics in enumerate(evaluations, start=1)
        ),
    )


def losses(*values: float) -> list[dict[str, float]]:
    return [{"loss": value} for value in values]


@pytest.mark.parametrize(
    ("evaluations", "metric", "epoch"),
    [
        (losses(4.0, 3.0, 2.5), "loss", 3),
        (losses(4.0, 2.5, 3.0), "loss", 2),
        (losses(2.5, 2.5), "loss", 1),
        (losses(nan, 3.0, -inf), "loss", 2),
        ([{"accuracy": 0.5, "loss": 1.0}, {"accuracy": 0.4, "loss": 0.1}], "accuracy", 1),
        ([{"accuracy": 0.0}, {"accuracy": 0.1}], "accuracy", 2),
        ([{"perplexity": 3.0}, {"perplexity": 9.0}], "perplexity", 1),
        ([{"f1": 0.3}, {"f1": 0.9}], "f1", 2),
        # Whether higher is better isn't known: the last epoch counts as the best one.
        ([{"tokens": 3.0}, {"tokens": 9.0}], None, 2),
        (losses(nan, nan), "loss", 2),
    ],
)
def test_default_metric_is_accuracy_and_then_loss(
    evaluations: list[dict[str, float]], metric: str | None, epoch: int
) -> None:
    job = job_with({}, evaluations)

    assert (job.metric.name if job.metric else None) == metric
    assert job.best == job.evaluations[epoch - 1]


@pytest.mark.parametrize(("mode", "epoch"), [("min", 2), ("max", 3)])
def test_named_metric_ranks_epochs(mode: str, epoch: int) -> None:
    stop = {"metric": {"name": "perplexity", "mode": mode}}
    values = [5.0, 3.0, 7.0]

    job = job_with(stop, [{"accuracy": 0.1 * each, "perplexity": each} for each in values])

    assert job.best == job.evaluations[epoch - 1]


def test_evaluations_without_the_named_metric_are_not_candidates() -> None:
    job = job_with(
        {"metric": {"name": "f1", "mode": "max"}}, [{"accuracy": 0.9}, {"f1": 0.2}, {"f1": 0.1}]
    )

    assert job.best == job.evaluations[1]


def test_last_epoch_is_the_best_while_no_evaluation_has_the_named_metric() -> None:
    job = job_with(
        {"metric": {"name": "f1", "mode": "max"}}, [{"accuracy": 0.9}, {"accuracy": 0.1}]
    )

    assert job.metric is None
    assert job.best == job.evaluations[-1]


def test_no_epoch_is_the_best_before_the_first_evaluation() -> None:
    job = job_with({}, [])

    assert (job.metric, job.best) == (None, None)


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
        ({"metric": {"name": "f1", "mode": "max"}}, [{"f1": 1.0}, {"loss": 0.0}, {"f1": 0.5}], 1),
        ({"metric": {"name": "f1", "mode": "min"}}, [{"f1": 1.0}, {"f1": 0.5}], 0),
    ],
)
def test_evaluations_without_improvement_are_counted(
    stop: dict[str, Any], evaluations: list[dict[str, float]], count: int
) -> None:
    assert job_with(stop, evaluations).without_improvement == count
