"""Lengths of jobs with a job loop, a server, and workers."""

from __future__ import annotations

from support.harness import Harness
from support.training import Training


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
