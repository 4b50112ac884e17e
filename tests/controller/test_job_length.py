"""Lengths of jobs, and evaluations at other places than the ends of epochs."""

from __future__ import annotations

import pytest
from support.exact import counts_after
from support.harness import Harness
from support.training import BATCH, Training
from support.waiting import await_truth


def test_job_without_a_number_of_subtasks_gets_one_from_its_data(harness: Harness) -> None:
    # Given a job of 80 batches per epoch that sets no number of subtasks
    training = Training(harness, epochs=2, subtasks=None)
    assert training.plan.subtasks_per_epoch == 20

    # When it has ended
    training.start_with_job_loop()
    job = training.await_success()

    # Then the number that the first worker recorded was used
    assert job.facts is not None
    assert job.facts.subtasks_per_epoch == 20
    work = harness.jobs.work(job.id)
    assert (work["per_epoch"], work["total"], work["next"]) == (20, 40, 40)


def test_job_ends_exactly_at_its_number_of_samples_although_a_worker_is_killed(
    harness: Harness,
) -> None:
    # Given a job of 400 samples per epoch that ends in the middle of its second epoch
    training = Training(harness, max_samples=530, max_epoch_lead=0, step_seconds=0.02)

    # When a worker is killed in the middle of a subtask
    victim = training.await_any_mid_interval(training.start_with_job_loop())
    training.worker(victim).kill()

    # Then the model contains each sample of the planned part once per epoch
    job = training.await_success()
    assert job.reason == "all 530 samples are done"
    assert (job.finished_epochs, job.epochs) == (2, 2)
    assert [each.epoch for each in job.evaluations] == [1, 530 / 400]

    # and no lease was given for samples after the end
    assert harness.jobs.work(job.id)["total"] == 6


def test_job_ends_exactly_at_its_number_of_steps(harness: Harness) -> None:
    job = harness.submit_audit(samples=400, subtasks=None, max_steps=90)
    harness.start_server()
    harness.start_job_loop()
    harness.start_workers(job, 2)

    await_truth(lambda: harness.jobs.get(job).state.over, interval=0.05)

    done = harness.jobs.get(job)
    assert done.reason == "all 90 steps are done"
    assert done.totals["samples"] == done.totals["applied"] == 450
    assert done.model is not None
    counts = harness.checkpoints(job).read(done.model).floats.tolist()
    assert done.plan is not None
    assert counts == counts_after(done.plan, 2)


@pytest.mark.ci
def test_evaluations_between_epochs_are_of_exact_versions_although_a_worker_is_killed(
    harness: Harness,
) -> None:
    # Given a job of 80 steps per epoch that is evaluated every 24 steps, of 5 samples each
    every = 24 * BATCH
    training = Training(harness, evaluate={"every": "24 steps"}, max_epoch_lead=0)
    workers = training.start_with_job_loop()

    # When a worker is killed after the first evaluation
    await_truth(lambda: harness.jobs.get(training.job).evaluations)
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
    await_truth(lambda: harness.tensors.connection.dbsize() == 0)


@pytest.mark.ci
def test_evaluations_by_time_are_of_newer_and_newer_models(harness: Harness) -> None:
    training = Training(harness, samples=2000, epochs=1, subtasks=100, evaluate={"every": "0.2s"})
    training.start_with_job_loop()

    await_truth(lambda: len(harness.jobs.get(training.job).evaluations) >= 3)
    job = training.await_success()

    samples = [each.samples or 0 for each in job.evaluations]
    assert samples == sorted(samples)
    assert len(set(samples)) >= 3
    assert samples[-1] == training.total
    for each in job.evaluations:
        assert each.metrics["applied"] == pytest.approx((each.samples or 0) / 2000)
