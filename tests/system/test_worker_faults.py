"""Consequences of the loss of workers; each job counts how often its samples are applied."""

from __future__ import annotations

import threading
import time

import pytest
from support.harness import Harness
from support.training import BATCH, Training
from support.waiting import await_truth

from vcasgd.controller.fleet.act import hand_in, hand_in_seconds
from vcasgd.fleet.notices import NoticeKind
from vcasgd.settings import Settings
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.leases import Leases, LostWorkers
from vcasgd.store.ledger.untrusted import Heartbeat
from vcasgd.store.ledger.workers import WorkerBeats

#: Long enough for a notice to be seen, and many steps.
NOTICE_SECONDS = 8.0


def test_a_worker_that_is_asked_to_leave_loses_nothing(harness: Harness) -> None:
    # Given a worker in the middle of a subtask that it pushes only at its end
    training = Training(harness, samples=300, epochs=1, subtasks=1, push_every="subtask")
    (leaver,) = training.start(1)
    training.await_steps(leaver, 20)

    assert training.worker(leaver).terminate() == 0

    # Then everything it trained is applied, and the rest of its subtask is free at once
    trained = BATCH * len(training.steps_of(leaver))
    await_truth(lambda: harness.applied(training.job) == trained)
    assert BATCH * 20 <= trained < training.total
    assert training.heartbeat(leaver).samples == trained
    assert harness.jobs.leases(training.job) == {}

    # and the next worker continues at the next sample
    (successor,) = training.add_workers(1)
    training.finish()
    expected = training.plan.indices(0, trained, trained + BATCH)
    assert training.steps_of(successor)[0] == expected.tolist()
    assert training.unexplained_repeats() == 0
    assert "expired" not in harness.jobs.work(training.job)


def test_a_stack_that_is_stopped_as_planned_loses_nothing(harness: Harness) -> None:
    # Given workers in the middle of subtasks that they push only at their end, and a dead one
    training = Training(harness, samples=9000, epochs=1, subtasks=3, push_every="subtask")
    *names, dead = training.start(3)
    for name in (*names, dead):
        training.await_steps(name, 5)
    training.worker(dead).kill()

    # When the controller stops with the whole stack, and waits for a busy machine
    hand_in(harness.jobs, WorkerBeats(harness.ledger.connection), Settings(heartbeat=2.0))

    # Then they have left, everything they trained is applied, and the job has no event of a loss
    assert [training.worker(name).wait() for name in names] == [0, 0]
    trained = BATCH * sum(len(training.steps_of(name)) for name in names)
    await_truth(lambda: harness.applied(training.job) == trained)
    assert 2 * BATCH * 5 <= trained < training.total
    assert harness.events(training.job, "not-handed-in") == []


def test_a_worker_that_does_not_hand_in_is_named_after_a_bounded_time(harness: Harness) -> None:
    training, settings = Training(harness), Settings(heartbeat=0.3)
    leases = Leases(harness.ledger.connection, training.job, "stubborn", 60.0)
    over = threading.Event()

    def beat() -> None:
        while not over.wait(settings.heartbeat / 10):
            leases.renew({"at": time.time(), "doing": "training"}, [])

    beats = threading.Thread(target=beat)
    beats.start()
    await_truth(lambda: harness.jobs.workers.count(training.job) == 1)

    hand_in(harness.jobs, WorkerBeats(harness.ledger.connection), settings)

    over.set()
    beats.join()
    (event,) = harness.events(training.job, "not-handed-in")
    assert event["details"]["workers"] == ["stubborn"]


@pytest.mark.parametrize(
    ("step_seconds", "expected"), [(None, 10.0), (0.5, 11.0), (20.0, 50.0), (600.0, 60.0)]
)
def test_the_time_to_hand_in_grows_with_a_local_step(
    step_seconds: float | None, expected: float
) -> None:
    beats = [Heartbeat(), Heartbeat(step_seconds=step_seconds)]
    assert hand_in_seconds(beats, Settings(heartbeat=1.0)) == expected


def test_a_worker_evicted_with_notice_loses_nothing(harness: Harness) -> None:
    # Given a worker on a spot machine, and one elsewhere
    training = Training(harness, samples=1600, push_every="subtask", step_seconds=0.1)
    training.start(1)
    evicted = harness.start_noticing_worker(training.job)
    training.await_steps(evicted, 5)

    steps, given_at = len(training.steps_of(evicted)), time.time()
    harness.notify(evicted, NoticeKind.TERMINATE, NOTICE_SECONDS)
    gone_by = time.time() + NOTICE_SECONDS

    # Then the worker reports it, trains on for longer than the second until it looks for notices,
    # and leaves before the machine is taken
    await_truth(lambda: training.heartbeat(evicted).notice == "terminate")
    assert training.worker(evicted).wait() == 0
    assert len(training.steps_of(evicted)) >= steps + 20
    noticed = training.heartbeat(evicted).notice_at or 0.0
    assert given_at + NOTICE_SECONDS - 1.0 <= noticed <= gone_by + 1.0
    assert training.heartbeat(evicted).leaving == "notice of eviction"
    assert evicted not in harness.jobs.leases(training.job).values()

    training.finish()
    assert training.unexplained_repeats() == 0


def test_an_advised_worker_finishes_its_subtask_first(harness: Harness) -> None:
    # Given a worker in the middle of a subtask that was advised to leave and continues
    training = Training(harness, samples=400, push_every=4)
    training.start(1)
    advised = harness.start_noticing_worker(training.job)
    training.await_steps(advised, 3)
    harness.notify(advised, NoticeKind.REBALANCE)
    await_truth(lambda: training.heartbeat(advised).notice == "rebalance")
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
    assert training.unexplained_repeats() == 0


@pytest.mark.parametrize("harness", [0.25], indirect=True, ids=["short leases"])
def test_a_killed_worker_costs_at_most_one_push_interval(harness: Harness) -> None:
    # Given two workers, one of them in the middle of a push interval
    training = Training(harness)
    victim, _ = training.start(2)
    training.freeze_mid_interval(victim)

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


@pytest.mark.ci
@pytest.mark.parametrize("harness", [0.25], indirect=True, ids=["short leases"])
def test_the_death_of_all_workers_at_once_costs_one_push_interval_each(harness: Harness) -> None:
    training = Training(harness, samples=600)
    victims = training.start(3)
    for victim in victims:
        training.await_steps(victim, 1)
    training.await_samples(200)

    for victim in victims:
        training.worker(victim).kill()
    training.add_workers(3)

    training.finish()
    assert training.repeated_samples() <= 2 * training.most_repeated_samples(killed=3)


@pytest.mark.parametrize("harness", [0.25], indirect=True, ids=["short leases"])
def test_a_worker_with_an_expired_lease_cannot_write(harness: Harness) -> None:
    # Given a worker that is suspended in the middle of a push interval
    training = Training(harness)
    sleeper, other = training.start(2)
    training.freeze_mid_interval(sleeper)
    held = harness.jobs.leases(training.job)
    subtask = next(piece for piece, holder in held.items() if holder == sleeper)

    # When it resumes after another worker has leased its subtask
    await_truth(lambda: harness.jobs.leases(training.job).get(subtask) == other)
    training.await_steps(other, len(training.steps_of(other)) + 2)
    training.worker(sleeper).thaw()

    # Then its late updates aren't applied, and it trains something else
    training.await_steps(sleeper, len(training.steps_of(sleeper)) + 5)
    training.finish()
    # It lives, so it may have begun an interval more before it knew that its lease was lost.
    assert 0 < training.repeated_samples() <= training.most_repeated_samples(killed=0)
    assert training.worker(sleeper).alive
