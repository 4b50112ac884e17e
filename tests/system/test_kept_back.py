"""The residual of an encoding isn't lost: the last push of a leaving worker contains it.

Each coordinate of the model counts one sample. Under ``partition`` all coordinates are in one of
four parts, so three of four pushes carry nothing, and only what is kept back makes the count exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.harness import Plain
from support.training import BATCH, Training

Eventually = Callable[..., Any]

PARTITION = {"rule": "async-local-sgd", "eta": 1.0, "codec": "partition"}


def assert_all_is_there(training: Training, trained: int) -> None:
    """Assert that the model has all samples of its applied record, and no worker has a residual."""
    plain = training.plain
    assert plain.applied(training.job) == trained
    assert sum(plain.vector(training.job).tolist()) == trained


def test_a_worker_that_leaves_in_an_interval_pushes_its_residual(
    plain: Plain, eventually: Eventually
) -> None:
    # Given a worker that trains
    training = Training(plain, samples=300, epochs=1, subtasks=1, push_every=4, update=PARTITION)
    (leaver,) = training.start(1)
    training.await_steps(leaver, 6)

    # When it is asked to leave
    assert training.worker(leaver).terminate() == 0

    # Then everything it trained is in the model
    trained = BATCH * len(training.steps_of(leaver))
    eventually(lambda: plain.applied(training.job) == trained)
    assert 0 < trained < training.total
    assert_all_is_there(training, trained)


def test_a_leaving_worker_makes_one_more_step_for_its_residual(
    plain: Plain, eventually: Eventually
) -> None:
    # Given a worker that has pushed and waits for a suspended parameter server
    training = Training(plain, samples=300, epochs=1, subtasks=1, push_every=2, update=PARTITION)
    (leaver,) = training.start(1)
    training.reach(2 * BATCH)
    plain.server.freeze()
    eventually(lambda: training.beat(leaver).unapplied == 2)
    before = len(training.steps_of(leaver))

    # When it is asked to leave
    assert training.worker(leaver).terminate() == 0
    plain.server.thaw()

    # Then it makes one more step, and everything it trained is in the model
    assert len(training.steps_of(leaver)) == before + 1
    eventually(lambda: plain.applied(training.job) == BATCH * (before + 1))
    assert_all_is_there(training, BATCH * (before + 1))


def test_the_end_of_a_job_leaves_no_residual(plain: Plain) -> None:
    # Given two workers, and so many subtasks that most aren't near the end
    training = Training(
        plain,
        samples=400,
        epochs=3,
        subtasks=10,
        push_every=2,
        update=PARTITION,
        workers={"max": 2},
    )
    training.start(2)

    # Then the model is exact when the job is complete
    training.finish()
    assert training.trained_again() == 0
