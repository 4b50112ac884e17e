"""The residual of an encoding isn't lost: the last push of a leaving worker contains it.

Each coordinate of the model counts one sample. Under ``partition`` all coordinates are in one of
four parts, so three of four pushes carry nothing, and only what is kept back makes the count exact.
"""

from __future__ import annotations

import pytest
from support.harness import Harness
from support.training import BATCH, Training
from support.waiting import await_truth

PARTITION = {"rule": "async-local-sgd", "eta": 1.0, "codec": "partition"}


def assert_complete(training: Training, trained: int) -> None:
    """Assert that the model has all samples of its applied record, and no worker has a residual."""
    harness = training.harness
    assert harness.applied(training.job) == trained
    assert sum(harness.vector(training.job).tolist()) == trained


def test_a_leaving_worker_makes_one_more_step_for_its_residual(harness: Harness) -> None:
    # Given a worker that has pushed and waits for a suspended parameter server
    training = Training(harness, samples=300, epochs=1, subtasks=1, push_every=2, update=PARTITION)
    (leaver,) = training.start(1)
    training.await_samples(2 * BATCH)
    harness.server.freeze()
    before = harness.applied(training.job) // BATCH + 2 * 2

    def waits() -> bool:
        heartbeat = training.heartbeat(leaver)
        return heartbeat.unapplied == 2 and heartbeat.samples == BATCH * before

    await_truth(waits)

    assert training.worker(leaver).terminate() == 0
    harness.server.thaw()

    assert len(training.steps_of(leaver)) == before + 1
    await_truth(lambda: harness.applied(training.job) == BATCH * (before + 1))
    assert_complete(training, BATCH * (before + 1))


@pytest.mark.ci
def test_the_end_of_a_job_leaves_no_residual(harness: Harness) -> None:
    # Given two workers, and so many subtasks that most aren't near the end
    training = Training(
        harness,
        samples=400,
        epochs=3,
        subtasks=10,
        push_every=2,
        update=PARTITION,
        workers={"max": 2},
    )
    training.start(2)

    training.finish()
    assert training.unexplained_repeats() == 0
