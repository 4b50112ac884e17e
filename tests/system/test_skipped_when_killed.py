"""Bad samples of a job whose workers and parameter server are killed: each counts once."""

from __future__ import annotations

import pytest
from support.harness import Harness
from support.waiting import await_truth

from vcasgd.store.ledger.job import JobState

SAMPLES, EPOCHS = 400, 2
#: Samples that can't be loaded, and the one whose loss isn't finite.
BAD = {50, 150, 250, 350, 75}


@pytest.mark.ci
def test_applied_and_skipped_samples_are_all_samples(harness: Harness) -> None:
    job = harness.submit_audit(
        samples=SAMPLES,
        epochs=EPOCHS,
        step_seconds=0.02,
        args={"bad": True},
        on_bad_sample="skip",
        max_bad_samples=0.05,
    )
    harness.start_servers()
    names = harness.start_workers(job, 2)
    harness.start_job_when_ready(job)

    await_truth(lambda: harness.applied(job) > SAMPLES // 2)
    harness.workers[names[0]].kill()
    harness.server.kill()
    harness.start_servers()
    await_truth(lambda: harness.jobs.get(job).finished_epochs == EPOCHS)

    counts = harness.vector(job).tolist()
    assert {index for index, count in enumerate(counts) if count != EPOCHS} == BAD
    assert {counts[index] for index in BAD} == {0}
    totals = harness.jobs.get(job).totals
    assert (totals["skipped"], totals["repeated"]) == (EPOCHS * len(BAD), 0)
    assert sum(counts) + totals["skipped"] == totals["applied"] == EPOCHS * SAMPLES


def test_too_many_bad_samples_fail_the_job(harness: Harness) -> None:
    job = harness.submit_audit(
        samples=SAMPLES, epochs=20, args={"bad": True}, on_bad_sample="skip", max_bad_samples=7
    )
    harness.start_server()
    harness.start_job_loop()
    harness.start_workers(job, 1)

    await_truth(lambda: harness.jobs.get(job).state is JobState.FAILED)

    reason = harness.jobs.get(job).reason or ""
    assert "more than the 7 of max_bad_samples" in reason
    named = {event["details"]["sample"] for event in harness.events(job, "bad-sample")}
    assert named <= {str(index) for index in BAD}
