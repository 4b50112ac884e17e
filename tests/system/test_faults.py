"""Consequences of dead servers; each job counts how often its samples are applied."""

from __future__ import annotations

import time

import pytest
from support.harness import Harness
from support.training import BATCH, running
from support.waiting import await_truth

# --- the parameter server --------------------------------------------------------------


@pytest.mark.ci
def test_repeated_deaths_of_the_parameter_server_lose_nothing(harness: Harness) -> None:
    training = running(harness, samples=1200)

    # Each time while workers push
    for _ in range(5):
        training.await_more_samples(training.interval)
        harness.server.kill()
        harness.start_server()

    training.finish()
    assert training.unexplained_repeats() == 0
    assert harness.jobs.get(training.job).totals["rejected"] == {}


@pytest.mark.ci
def test_a_suspended_parameter_server_that_was_replaced_gives_up(harness: Harness) -> None:
    training = running(harness, samples=600)
    sleeper = harness.server
    sleeper.freeze()

    # When it resumes after another one has taken over
    harness.start_server()
    training.await_more_samples(100)
    sleeper.thaw()

    assert sleeper.wait() == 3
    training.finish()
    assert harness.server.alive
    assert training.unexplained_repeats() == 0


def test_an_empty_tensors_server_gets_model_and_updates_again(harness: Harness) -> None:
    # Given updates that wait in the tensors server
    training = running(harness, samples=600)
    harness.server.freeze()
    frozen_at = time.time()

    def wait_with_updates(name: str) -> bool:
        # An older heartbeat can name updates that were applied before the server was frozen.
        beat = training.heartbeat(name)
        return beat.unapplied == 2 and (beat.at or 0) > frozen_at

    await_truth(lambda: all(map(wait_with_updates, harness.workers)))

    harness.tensors.kill()
    harness.tensors.start()
    assert harness.tensors.connection.dbsize() == 0
    harness.server.thaw()

    # Then the parameter server publishes the model again, and the workers push their updates again
    training.finish()
    # The event is reported beside the work.
    await_truth(lambda: len(harness.events(training.job, "republished")) == 1)
    await_truth(
        lambda: all((training.heartbeat(name).pushed_again or 0) >= 1 for name in harness.workers)
    )
    assert training.unexplained_repeats() == 0


def test_repeated_deaths_of_the_tensors_server_lose_nothing(harness: Harness) -> None:
    training = running(harness, samples=800)

    # Each time while workers push
    for deaths in range(1, 6):
        training.await_more_samples(training.interval)
        harness.tensors.kill()
        harness.tensors.start()
        # If it dies during the new publication, the parameter server may report both as one.
        await_truth(lambda n=deaths: len(harness.events(training.job, "republished")) == n)

    training.finish()
    assert harness.server.alive


def kill_both(harness: Harness) -> None:
    harness.server.kill()
    harness.tensors.kill()
    harness.tensors.start()
    harness.start_server()


def test_the_loss_of_both_servers_restores_the_last_checkpoint(harness: Harness) -> None:
    training = running(harness, applied=300)
    checkpoint = harness.checkpoints(training.job).read(harness.checkpoint(training.job)).whole[0]
    training.await_more_samples(100)

    kill_both(harness)

    (event,) = await_truth(lambda: harness.events(training.job, "restored"))
    assert event["details"]["version"] == checkpoint.meta.version
    lost = BATCH * len(training.steps()) - checkpoint.meta.totals.samples

    # and exactly the work after it is trained again
    training.finish()
    lost += 2 * 2 * training.interval + training.most_repeated_samples(killed=0)
    assert 0 < training.repeated_samples() <= lost


@pytest.mark.ci
def test_the_loss_of_both_servers_before_a_checkpoint_restarts_the_job(harness: Harness) -> None:
    training = running(harness, applied=200)

    kill_both(harness)

    await_truth(lambda: harness.events(training.job, "restarted"))
    training.finish()
    assert training.repeated_samples() >= 200


def test_training_continues_while_the_ledger_is_down_and_nothing_is_lost(
    harness: Harness,
) -> None:
    training = running(harness, samples=800, subtasks=2)
    events, tokens = harness.jobs.events(training.job), harness.jobs.work(training.job)["tokens"]

    harness.ledger.kill()

    training.await_more_samples(4 * training.interval)

    # and when it is back, it has everything that it acknowledged
    harness.ledger.start()
    assert harness.jobs.events(training.job)[: len(events)] == events
    assert harness.jobs.work(training.job)["tokens"] >= tokens
    training.finish()
    assert training.unexplained_repeats() == 0
    assert all(worker.alive for worker in harness.workers.values())
    assert harness.server.alive
