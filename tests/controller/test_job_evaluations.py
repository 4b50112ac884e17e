"""Evaluations of a running job at other places than the ends of epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.harness import Harness
from support.training import BATCH, Training

Eventually = Callable[..., Any]


def test_evaluations_between_epochs_are_of_exact_versions_although_a_worker_is_killed(
    harness: Harness, eventually: Eventually
) -> None:
    # Given a job of 80 steps per epoch that is evaluated every 24 steps, of 5 samples each
    every = 24 * BATCH
    training = Training(harness, evaluate={"every": "24 steps"}, max_epoch_lead=0)
    workers = training.start_with_job_loop()

    # When a worker is killed after the first evaluation
    eventually(lambda: harness.jobs.get(training.job).evaluations)
    training.worker(training.await_any_mid_interval(workers)).kill()
    job = training.await_success()

    # Then there are evaluations just after multiples of 24 steps, and one at the end
    numbers = [each.number for each in job.evaluations]
    assert numbers == sorted(set(numbers))
    assert len(numbers) >= 3
    assert numbers[-1] == training.total
    assert all(number % every == 0 for number in numbers[:-1])

    # and each is of the version whose samples it names
    for each in job.evaluations:
        assert each.samples is not None
        assert each.samples >= each.number
        assert each.metrics["applied"] == pytest.approx(each.samples / 400)
        assert each.epoch == each.samples / 400
        assert each.step == each.samples // BATCH
    assert job.evaluations[-1].samples == training.total
    assert [event["details"]["samples"] for event in harness.events(job.id, "evaluated")]

    # and the stored model is the last of them
    assert job.model is not None
    stored = harness.checkpoints(job.id).read(job.model).whole[0]
    assert stored.meta.version == job.evaluations[-1].version
    eventually(lambda: harness.tensors.connection.dbsize() == 0)


def test_evaluations_by_time_are_of_newer_and_newer_models(
    harness: Harness, eventually: Eventually
) -> None:
    training = Training(harness, samples=2000, epochs=1, subtasks=100, evaluate={"every": "0.2s"})
    training.start_with_job_loop()

    eventually(lambda: len(harness.jobs.get(training.job).evaluations) >= 3)
    job = training.await_success()

    samples = [each.samples or 0 for each in job.evaluations]
    assert samples == sorted(samples)
    assert len(set(samples)) >= 3
    assert samples[-1] == training.total
    for each in job.evaluations:
        assert each.metrics["applied"] == pytest.approx((each.samples or 0) / 2000)
