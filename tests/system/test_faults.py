"""Consequences of dead servers; each job counts how often its samples are applied."""

from __future__ import annotations

import time

from support.harness import Harness
from support.training import BATCH, Training
from support.waiting import await_truth

# --- the parameter server --------------------------------------------------------------


def test_repeated_deaths_of_the_parameter_server_lose_nothing(harness: Harness) -> None:
    # Given a running job
    training = Training(harness, samples=1200)
    training.start(2)

    # When the parameter server is killed five times, each time while workers push
    for _ in range(5):
        training.await_more_samples(training.interval)
        harness.server.kill()
        harness.start_server()

    # Then nothing is lost, and nothing is trained or pushed twice
    training.finish()
    assert training.unexplained_repeats() == 0
    assert harness.jobs.get(training.job).totals["rejected"] == {}


def test_a_suspended_parameter_server_that_was_replaced_gives_up(harness: Harness) -> None:
    # Given a suspended parameter server
    training = Training(harness, samples=600)
    training.start(2)
    training.await_more_samples(100)
    sleeper = harness.server
    sleeper.freeze()

    # When it resumes after another one has taken over
    harness.start_server()
    training.await_more_samples(100)
    sleeper.thaw()

    # Then it ends, because it is fenced
    assert sleeper.wait() == 3
    training.finish()
    assert harness.server.alive
    assert training.unexplained_repeats() == 0


# --- the tensors server ----------------------------------------------------------------


def test_an_empty_tensors_server_gets_model_and_updates_again(harness: Harness) -> None:
    # Given updates that wait in the tensors server
    training = Training(harness, samples=600)
    names = training.start(2)
    training.await_more_samples(100)
    harness.server.freeze()
    frozen_at = time.time()

    def wait_with_updates(name: str) -> bool:
        # An older heartbeat can name updates that were applied before the server was frozen.
        beat = training.heartbeat(name)
        return beat.unapplied == 2 and (beat.at or 0) > frozen_at

    await_truth(lambda: all(wait_with_updates(name) for name in names))

    # When it is killed and restarts empty
    harness.tensors.kill()
    harness.tensors.start()
    assert harness.tensors.connection.dbsize() == 0
    harness.server.thaw()

    # Then the parameter server publishes the model again, and the workers push their updates again
    training.finish()
    # The event is reported beside the work.
    await_truth(lambda: len(harness.events(training.job, "republished")) == 1)
    await_truth(lambda: all((training.heartbeat(name).pushed_again or 0) >= 1 for name in names))
    assert training.unexplained_repeats() == 0


def test_repeated_deaths_of_the_tensors_server_lose_nothing(harness: Harness) -> None:
    # Given a running job
    training = Training(harness, samples=800)
    training.start(2)

    # When the tensors server is killed five times, each time while workers push
    for deaths in range(1, 6):
        training.await_more_samples(training.interval)
        harness.tensors.kill()
        harness.tensors.start()
        # If it dies during the new publication, the parameter server may report both as one.
        await_truth(lambda n=deaths: len(harness.events(training.job, "republished")) == n)

    # Then nothing is lost
    training.finish()
    assert harness.server.alive


# --- both at once ----------------------------------------------------------------------


def kill_both(harness: Harness) -> None:
    """Kill the tensors server and the parameter server, so that no copy of the model is left."""
    harness.server.kill()
    harness.tensors.kill()
    harness.tensors.start()
    harness.start_server()


def test_the_loss_of_both_servers_restores_the_last_checkpoint(harness: Harness) -> None:
    # Given a checkpoint, and updates after it
    training = Training(harness)
    training.start(2)
    training.await_samples(300)
    checkpoint = harness.checkpoints(training.job).read(harness.checkpoint(training.job)).whole[0]
    training.await_more_samples(100)

    # When the tensors server and the parameter server die together
    kill_both(harness)

    # Then the job resumes from the checkpoint and reports it
    (event,) = await_truth(lambda: harness.events(training.job, "restored"))
    assert event["details"]["version"] == checkpoint.meta.version
    lost = BATCH * len(training.steps()) - checkpoint.meta.totals.samples

    # and exactly the work after it is trained again
    training.finish()
    lost += 2 * 2 * training.interval + training.most_repeated_samples(killed=0)
    assert 0 < training.repeated_samples() <= lost


def test_the_loss_of_both_servers_before_a_checkpoint_restarts_the_job(harness: Harness) -> None:
    # Given a job that has no checkpoint yet
    training = Training(harness)
    training.start(2)
    training.await_samples(200)

    # When both servers die
    kill_both(harness)

    # Then it restarts with the first model and reports it
    await_truth(lambda: harness.events(training.job, "restarted"))
    training.finish()
    assert training.repeated_samples() >= 200


# --- the ledger ------------------------------------------------------------------------


def test_training_continues_while_the_ledger_is_down_and_nothing_is_lost(
    harness: Harness,
) -> None:
    # Given a running job
    training = Training(harness, samples=800, subtasks=2)
    names = training.start(2)
    training.await_more_samples(100)
    events, tokens = harness.jobs.events(training.job), harness.jobs.work(training.job)["tokens"]

    # When the ledger is killed
    harness.ledger.kill()

    # Then updates are still applied
    training.await_more_samples(4 * training.interval)

    # and when it is back, it has everything that it acknowledged
    harness.ledger.start()
    assert harness.jobs.events(training.job)[: len(events)] == events
    assert harness.jobs.work(training.job)["tokens"] >= tokens
    training.finish()
    assert training.unexplained_repeats() == 0
    assert all(training.worker(name).alive for name in names)
    assert harness.server.alive
