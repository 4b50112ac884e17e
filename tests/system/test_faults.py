"""Consequences of real faults; each job counts how often its samples are applied."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.harness import Harness
from support.metadata import Metadata, MetadataServer
from support.training import BATCH, Training

from vcasgd.store.keys import LedgerKeys, TensorKeys
from vcasgd.store.ledger.lost_workers import LostWorkers
from vcasgd.store.tensors.bf16_split import bytes_of
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.updates import checksum

Eventually = Callable[..., Any]
#: Long enough for a notice to be seen, and some steps.
NOTICE_SECONDS = 5.0


# --- workers, with notice --------------------------------------------------------------


@pytest.fixture
def cloud() -> Iterator[MetadataServer]:
    """The metadata server of a machine that can be evicted."""
    server = MetadataServer(Metadata("i-1"))
    server.start()
    yield server
    server.stop()


def test_a_worker_that_is_asked_to_leave_loses_nothing(
    harness: Harness, eventually: Eventually
) -> None:
    # Given a worker in the middle of a subtask that it pushes only at its end
    training = Training(harness, samples=300, epochs=1, subtasks=1, push_every="subtask")
    (leaver,) = training.start(1)
    training.await_steps(leaver, 20)

    # When it is asked to leave
    assert training.worker(leaver).terminate() == 0

    # Then everything it trained is applied, and the rest of its subtask is free at once
    trained = BATCH * len(training.steps_of(leaver))
    eventually(lambda: harness.applied(training.job) == trained)
    assert BATCH * 20 <= trained < training.total
    assert training.heartbeat(leaver).samples == trained
    assert harness.jobs.leases(training.job) == {}

    # and the next worker continues at the next sample
    (successor,) = training.add_workers(1)
    training.finish()
    expected = training.plan.indices(0, trained, trained + BATCH)
    assert training.steps_of(successor)[0] == expected.tolist()
    assert training.repeated_samples() == 0
    assert "expired" not in harness.jobs.work(training.job)


def test_a_worker_evicted_with_notice_loses_nothing(
    harness: Harness, cloud: MetadataServer, eventually: Eventually
) -> None:
    # Given a worker on a spot machine, and one elsewhere
    training = Training(harness, push_every="subtask")
    training.start(1)
    evicted = harness.start_noticing_worker(training.job, cloud.url)
    training.await_steps(evicted, 5)

    # When the cloud gives notice
    gone_at = time.time() + NOTICE_SECONDS
    cloud.metadata.notify(gone_at)

    # Then the worker reports it, trains on, and leaves before the machine is taken
    eventually(lambda: training.heartbeat(evicted).notice == "terminate")
    training.await_steps(evicted, len(training.steps_of(evicted)) + 5)
    assert training.worker(evicted).wait() == 0
    assert training.heartbeat(evicted).notice_at == pytest.approx(gone_at, abs=1.0)
    assert training.heartbeat(evicted).leaving == "notice of eviction"
    assert evicted not in harness.jobs.leases(training.job).values()

    # and nothing is lost or trained twice
    training.finish()
    assert training.repeated_samples() == 0


def test_a_drained_worker_loses_nothing(harness: Harness) -> None:
    # Given two workers
    training = Training(harness, push_every="subtask")
    drained, _ = training.start(2)
    training.await_steps(drained, 5)

    # When the controller drains one of them
    harness.jobs.workers.drain([(training.job, drained)])

    # Then it leaves in good order
    assert training.worker(drained).wait() == 0
    training.finish()
    assert training.repeated_samples() == 0


def test_an_advised_worker_finishes_its_subtask_first(
    harness: Harness, cloud: MetadataServer, eventually: Eventually
) -> None:
    # Given a worker in the middle of a subtask that was advised to leave and continues
    training = Training(harness, samples=400, push_every=4)
    training.start(1)
    advised = harness.start_noticing_worker(training.job, cloud.url)
    training.await_steps(advised, 3)
    cloud.metadata.recommend_rebalance()
    eventually(lambda: training.heartbeat(advised).notice == "rebalance")
    training.await_mid_interval(advised)

    # When the controller has a replacement and drains the worker
    harness.jobs.workers.drain([(training.job, advised)])

    # Then it leaves after the last sample of its subtask, which isn't leased again
    assert training.worker(advised).wait() == 0
    assert training.heartbeat(advised).leaving == "drain"
    assert (training.heartbeat(advised).samples or 1) % (400 // 4) == 0
    training.finish()
    counters = harness.ledger.connection.hkeys(LedgerKeys(training.job).counters)
    assert not [name for name in counters if name.startswith(b"again:")]
    assert training.repeated_samples() == 0


def test_an_advised_worker_returns_a_subtask_that_takes_too_long(
    harness: Harness, cloud: MetadataServer, eventually: Eventually
) -> None:
    # Given a worker that was advised to leave, with a subtask much longer than a lease
    training = Training(harness, samples=400, epochs=1, subtasks=2, step_seconds=1.0)
    advised = harness.start_noticing_worker(training.job, cloud.url)
    harness.start_servers()
    harness.start_job_when_ready(training.job)
    training.await_steps(advised, 1)
    cloud.metadata.recommend_rebalance()
    eventually(lambda: training.heartbeat(advised).notice == "rebalance")

    # When it is asked to leave
    harness.jobs.workers.drain([(training.job, advised)])

    # Then it pushes its update before the controller would kill it
    assert training.worker(advised).wait() == 0
    assert (training.heartbeat(advised).samples or 0) < 200
    assert advised not in harness.jobs.leases(training.job).values()
    training.add_workers(1)
    training.finish()
    assert training.repeated_samples() == 0


# --- workers, without notice -----------------------------------------------------------


@pytest.mark.parametrize("harness", [0.25], indirect=True, ids=["short leases"])
def test_a_killed_worker_costs_at_most_one_push_interval(harness: Harness) -> None:
    # Given two workers, one of them in the middle of a push interval
    training = Training(harness)
    victim, _ = training.start(2)
    training.freeze_mid_interval(victim)

    # When that one is killed without notice
    training.worker(victim).kill()

    # Then the other one trains the rest of its subtask when the lease has expired
    training.finish()
    assert 0 < training.repeated_samples() <= training.most_repeated_samples()


@pytest.mark.parametrize("reported", [True, False], ids=["reported", "unknown"])
def test_nobody_waits_for_the_lease_of_a_lost_worker(harness: Harness, reported: bool) -> None:
    # Given a worker in the middle of a push interval, with a lease of eight minutes
    training = Training(harness)
    training.start(1)
    harness.env["VCASGD_HEARTBEAT"] = "60"
    (victim,) = training.add_workers(1)
    training.freeze_mid_interval(victim)

    # When it is killed, and its provider may tell
    training.worker(victim).kill()
    assert victim in harness.jobs.leases(training.job).values()
    if reported:
        assert LostWorkers(harness.ledger.connection).report({training.job: [victim]})

    # Then the other one trains the rest of its subtask: at once, or when it has nothing else to do
    training.finish()
    work = harness.jobs.work(training.job)
    assert "expired" not in work
    assert ("overtaken" in work) is not reported
    assert 0 < training.repeated_samples() <= training.interval


@pytest.mark.parametrize("harness", [0.25], indirect=True, ids=["short leases"])
def test_the_death_of_all_workers_at_once_costs_one_push_interval_each(harness: Harness) -> None:
    # Given three training workers
    training = Training(harness, samples=600)
    victims = training.start(3)
    training.await_samples(200)

    # When all of them are killed at once, and others start
    for victim in victims:
        training.worker(victim).kill()
    training.add_workers(3)

    # Then the training ends as usual
    training.finish()
    assert training.repeated_samples() <= 2 * training.most_repeated_samples(killed=3)


@pytest.mark.parametrize("harness", [0.25], indirect=True, ids=["short leases"])
def test_a_worker_with_an_expired_lease_cannot_write(
    harness: Harness, eventually: Eventually
) -> None:
    # Given a worker that is suspended in the middle of a push interval
    training = Training(harness)
    sleeper, other = training.start(2)
    training.freeze_mid_interval(sleeper)
    held = harness.jobs.leases(training.job)
    subtask = next(piece for piece, holder in held.items() if holder == sleeper)

    # When it resumes after another worker has leased its subtask
    eventually(lambda: harness.jobs.leases(training.job).get(subtask) == other)
    training.await_steps(other, len(training.steps_of(other)) + 2)
    training.worker(sleeper).thaw()

    # Then its late updates aren't applied, and it trains something else
    training.await_steps(sleeper, len(training.steps_of(sleeper)) + 5)
    training.finish()
    # It lives, so it may have begun an interval more before it knew that its lease was lost.
    assert 0 < training.repeated_samples() <= training.most_repeated_samples(killed=0)
    assert training.worker(sleeper).alive


# --- the parameter server --------------------------------------------------------------


def test_repeated_deaths_of_the_parameter_server_lose_nothing(harness: Harness) -> None:
    # Given a running job
    training = Training(harness, samples=600)
    training.start(2)

    # When the parameter server is killed five times, each time while workers push
    for _ in range(5):
        training.await_more_samples(training.interval)
        harness.server.kill()
        harness.start_server()

    # Then nothing is lost, and nothing is trained or pushed twice
    training.finish()
    assert training.repeated_samples() == 0
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
    assert training.repeated_samples() == 0


# --- the tensors server ----------------------------------------------------------------


def test_an_empty_tensors_server_gets_model_and_updates_again(
    harness: Harness, eventually: Eventually
) -> None:
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

    eventually(lambda: all(wait_with_updates(name) for name in names))

    # When it is killed and restarts empty
    harness.tensors.kill()
    harness.tensors.start()
    assert harness.tensors.connection.dbsize() == 0
    harness.server.thaw()

    # Then the parameter server publishes the model again, and the workers push their updates again
    training.finish()
    assert len(harness.events(training.job, "republished")) == 1
    eventually(lambda: all((training.heartbeat(name).pushed_again or 0) >= 1 for name in names))
    assert training.repeated_samples() == 0


def test_repeated_deaths_of_the_tensors_server_lose_nothing(
    harness: Harness, eventually: Eventually
) -> None:
    # Given a running job
    training = Training(harness, samples=800)
    training.start(2)

    # When the tensors server is killed five times, each time while workers push
    for deaths in range(1, 6):
        training.await_more_samples(training.interval)
        harness.tensors.kill()
        harness.tensors.start()
        # If it dies during the new publication, the parameter server may report both as one.
        eventually(lambda n=deaths: len(harness.events(training.job, "republished")) == n)

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


def test_the_loss_of_both_servers_restores_the_last_checkpoint(
    harness: Harness, eventually: Eventually
) -> None:
    # Given a checkpoint, and updates after it
    training = Training(harness)
    training.start(2)
    training.await_samples(300)
    checkpoint = harness.checkpoints(training.job).read(harness.checkpoint(training.job)).whole[0]
    training.await_more_samples(100)

    # When the tensors server and the parameter server die together
    kill_both(harness)

    # Then the job resumes from the checkpoint and reports it
    (event,) = eventually(lambda: harness.events(training.job, "restored"))
    assert event["details"]["version"] == checkpoint.meta.version
    lost = BATCH * len(training.steps()) - checkpoint.meta.totals.samples

    # and exactly the work after it is trained again
    training.finish()
    assert 0 < training.repeated_samples() <= lost + 2 * 2 * training.interval


def test_the_loss_of_both_servers_before_a_checkpoint_restarts_the_job(
    harness: Harness, eventually: Eventually
) -> None:
    # Given a job that has no checkpoint yet
    training = Training(harness)
    training.start(2)
    training.await_samples(200)

    # When both servers die
    kill_both(harness)

    # Then it restarts with the first model and reports it
    eventually(lambda: harness.events(training.job, "restarted"))
    training.finish()
    assert training.repeated_samples() >= 200


def test_a_damaged_checkpoint_is_skipped(harness: Harness, eventually: Eventually) -> None:
    # Given two checkpoints, the newer one damaged
    training = Training(harness)
    training.start(2)
    training.await_samples(200)
    whole = harness.checkpoints(training.job).read(harness.checkpoint(training.job)).whole[0]
    training.await_more_samples(100)
    damaged = harness.checkpoint(training.job)
    harness.damage_checkpoint(training.job, damaged)

    # When both servers die
    kill_both(harness)

    # Then the older one is used, and the damage is reported
    (event,) = eventually(lambda: harness.events(training.job, "checkpoint-damaged"))
    assert damaged in event["text"]
    (event,) = eventually(lambda: harness.events(training.job, "restored"))
    assert event["details"]["version"] == whole.meta.version
    training.finish()


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
    assert training.repeated_samples() == 0
    assert all(training.worker(name).alive for name in names)
    assert harness.server.alive


# --- hostile updates -------------------------------------------------------------------


class Rogue:
    """A client with the password and the keys that writes into the stream directly."""

    def __init__(self, training: Training) -> None:
        self.tensors = training.harness.tensors.connection
        self.keys = TensorKeys(training.job)
        layout = training.harness.layout(training.job)
        self.honest = torch.ones(layout.floats)
        payload = bytes_of(self.honest)
        # The last subtask of the first epoch, which no worker has started.
        self.header = Header(
            update="rogue",
            worker="rogue",
            subtask=training.plan.subtasks_per_epoch - 1,
            start=0,
            stop=training.interval,
            base=0,
            token=2**40,
            codec="float32",
            size=len(payload),
            checksum=checksum(payload),
            layout=layout.digest(),
        )

    def send(self, name: str, *chunks: bytes | memoryview, **fields: Any) -> None:
        header = self.header.model_copy(update={"update": name, **fields})
        self.write(name, header.model_dump_json().encode(), *chunks)

    def write(self, name: str, header: bytes, *chunks: bytes | memoryview) -> None:
        for index, chunk in enumerate(chunks):
            self.tensors.set(self.keys.payload_chunk(name, index), chunk)
        self.tensors.xadd(self.keys.stream, {"h": header})


def test_updates_of_a_rogue_client_are_rejected_counted_and_reported(
    harness: Harness, eventually: Eventually
) -> None:
    # Given a running job and a hostile client
    training = Training(harness, subtasks=8)
    training.start(2)
    training.await_more_samples(training.interval)
    rogue = Rogue(training)
    payload = bytes_of(rogue.honest)
    poison = rogue.honest.clone()
    poison[7] = float("nan")
    nan = bytes_of(poison)

    # When updates arrive that are damaged in different ways
    rogue.send("rogue-1", payload, checksum=1)
    rogue.send("rogue-2", nan, checksum=checksum(nan))
    rogue.send("rogue-3", payload[:-4])
    rogue.send("rogue-4", payload, size=2**40)
    rogue.send("rogue-5")
    rogue.send("rogue-6", payload, layout="of another model")
    rogue.send("rogue-7", payload, codec="pickle")
    rogue.send("rogue-8", payload, subtask=2**40)
    rogue.send("rogue-9", payload, stop=2**40)
    rogue.send("rogue-10", payload, integers="AAAAAAAAAAA=")
    rogue.write("rogue-11", b"{}", payload)

    # Then each is rejected for its reason and reported
    reasons = {
        "checksum": 1, "non-finite": 1, "length": 2, "missing": 1, "layout": 1, "codec": 1,
        "range": 2, "integers": 1, "header": 1,
    }  # fmt: skip
    eventually(lambda: harness.jobs.get(training.job).totals["rejected"] == reasons)
    rejections = [event["details"] for event in harness.events(training.job, "update-rejected")]
    assert [each["worker"] for each in rejections] == ["rogue"] * 5 + ["unknown"]

    # and the sender gets no more work, while the training isn't harmed
    assert "rogue" in harness.jobs.workers.quarantined(training.job)
    assert len(harness.events(training.job, "worker-quarantined")) == 1
    training.finish()
    assert training.repeated_samples() == 0
    assert harness.server.alive
