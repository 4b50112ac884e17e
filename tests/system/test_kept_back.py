"""What encodings keep back is not lost: it goes with the last push of a worker that leaves.

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
    """The model has all samples that its record says, and no part of them is with a worker."""
    plain = training.plain
    assert plain.applied(training.job) == trained
    assert sum(plain.vector(training.job).tolist()) == trained


def test_a_worker_that_is_asked_to_go_in_an_interval_pushes_what_it_kept_back(
    plain: Plain, eventually: Eventually
) -> None:
    # Given a worker in the midst of its training
    training = Training(plain, samples=300, epochs=1, subtasks=1, push_every=4, update=PARTITION)
    (leaver,) = training.start(1)
    training.await_steps(leaver, 6)

    # When it is asked to go
    assert training.worker(leaver).terminate() == 0

    # Then all that it trained is in the model
    trained = BATCH * len(training.steps_of(leaver))
    eventually(lambda: plain.applied(training.job) == trained)
    assert 0 < trained < training.total
    assert_all_is_there(training, trained)


def test_a_worker_that_waits_for_the_parameter_server_makes_one_more_step_to_carry_it(
    plain: Plain, eventually: Eventually
) -> None:
    # Given a worker that has pushed and now waits for a parameter server that stands still
    training = Training(plain, samples=300, epochs=1, subtasks=1, push_every=2, update=PARTITION)
    (leaver,) = training.start(1)
    training.reach(2 * BATCH)
    plain.server.freeze()
    eventually(lambda: training.beat(leaver).unapplied == 2)
    before = len(training.steps_of(leaver))

    # When it is asked to go
    assert training.worker(leaver).terminate() == 0
    plain.server.thaw()

    # Then it has made one more step, and all that it trained is in the model
    assert len(training.steps_of(leaver)) == before + 1
    eventually(lambda: plain.applied(training.job) == BATCH * (before + 1))
    assert_all_is_there(training, BATCH * (before + 1))


def test_at_the_end_of_a_job_nothing_is_kept_back(plain: Plain) -> None:
    # Given two workers and so many subtasks that most of them are not near the end
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
