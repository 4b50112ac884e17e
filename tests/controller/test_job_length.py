"""Lengths of jobs with a job loop, a server, and workers."""

from __future__ import annotations

from support.exact import counts_after
from support.harness import Harness
from support.training import Training
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
