"""Training that diverges goes back to its best model, or fails with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from support.children import Child
from support.harness import Harness
from support.training import TASKS
from support.waiting import await_truth

from vcasgd.store.ledger.job import JobRecord, JobState

SAMPLES, EPOCHS = 100, 16
#: Rates of the task at which a step multiplies the weight by −1.8, and by −24.
TOO_HIGH, FAR_TOO_HIGH = 2.8, 25.0


def submit(harness: Harness, **args: Any) -> str:
    hold = harness.home / "hold"
    if "broken" in args:
        # The job must not end before it is broken.
        hold.touch()
    return harness.submit(
        TASKS,
        task="diverging:Parabola",
        args={"samples": SAMPLES, "hold": str(hold), **args},
        epochs=EPOCHS,
        subtasks_per_epoch=4,
        push_every="subtask",
        max_epoch_lead=0,
        update={"rule": "vc-asgd", "alpha": 0.5},
    )


def start(harness: Harness, job: str) -> Child:
    harness.start_servers()
    loop = harness.start_job_loop()
    harness.start_workers(job, 2)
    return loop


def rollbacks(harness: Harness, job: str) -> list[int]:
    shards = range(len(harness.nodes))
    return [harness.snapshots(job, each).read().meta.rollbacks for each in shards]


def await_success(harness: Harness, job: str) -> JobRecord:
    """Wait for the end of a job, whose model must be good and have each sample once."""
    await_truth(lambda: harness.jobs.get(job).state.over)
    done = harness.jobs.get(job)
    assert done.state is JobState.SUCCEEDED, done.reason
    assert done.totals["samples"] == done.totals["applied"] == EPOCHS * SAMPLES
    assert done.totals["repeated"] == 0
    assert harness.checkpoints(job).read(done.model).floats.abs().max() < 1e-3
    return done


@pytest.mark.ci
def test_a_job_recovers_from_a_learning_rate_that_is_too_high(harness: Harness) -> None:
    # Given a job whose learning rate becomes too high after an eighth of it
    job = submit(harness, steep=TOO_HIGH)

    start(harness, job)
    done = await_success(harness, job)

    # Then it went back once, with half the rate, and no worker was blamed
    (event,) = harness.events(job, "rolled-back")
    assert event["details"]["learning_rate"] == 0.5
    assert "it went back to the model of epoch " in event["text"]
    assert harness.jobs.workers.quarantined(job) == {}

    # and the models from then on are good
    later = [each for each in done.evaluations if each.rollbacks == 1]
    assert later
    assert all(each.metrics["loss"] < 0.011 for each in later)
    assert later[-1].number == done.final_evaluation == EPOCHS


@pytest.mark.ci
def test_a_job_that_keeps_diverging_fails_and_says_what_was_tried(harness: Harness) -> None:
    # Given a job whose learning rate becomes so high that an eighth of it is too much
    job = submit(harness, steep=FAR_TOO_HIGH)

    start(harness, job)

    await_truth(lambda: harness.jobs.get(job).state.over)
    failed = harness.jobs.get(job)
    assert failed.state is JobState.FAILED
    assert "training diverged 3 times since its best model, of epoch " in failed.reason
    assert "at last with 25% of the learning rate; lower the learning rate" in failed.reason
    assert len(harness.events(job, "rolled-back")) == 2


@pytest.mark.ci
def test_all_shards_go_back_to_the_same_evaluation(sharded: Harness) -> None:
    # Given a model over three nodes that has diverged while one node's server is suspended
    broken = sharded.home / "broken"
    job = submit(sharded, broken=str(broken), copies=3)
    loop = start(sharded, job)
    await_truth(lambda: sharded.jobs.get(job).evaluations)
    # Workers fail before the job loop decides.
    loop.freeze()
    broken.touch()
    await_truth(lambda: sharded.jobs.failures(job))
    (sharded.home / "hold").unlink()
    sharded.servers[1].freeze()
    assert not sharded.events(job, "rolled-back"), "the fault did not fire: it was too late"
    loop.thaw()

    await_truth(lambda: rollbacks(sharded, job) == [1, 0, 1])
    broken.unlink()

    sharded.servers[1].thaw()
    await_truth(lambda: rollbacks(sharded, job) == [1, 1, 1])
    await_success(sharded, job)
    assert len(sharded.events(job, "rolled-back")) == 1
