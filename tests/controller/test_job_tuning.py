"""Automatic tuning of a job: what the controller decides, publishes, and reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.fleet_records import PACKAGE, job_spec

from vcasgd.controller.jobs.tuning import MIN_UPDATES, Tuner
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Leases
from vcasgd.store.ledger.servers import Accounts
from vcasgd.store.ledger.tuning import Tuned, Tunings
from vcasgd.store.ledger.workers import WorkerBeats

PERIOD = 1.0
ALL = {"local_steps": True, "momentum": True, "mixing": True}


class TunedJob:
    """One running job and the controller's tuner."""

    def __init__(
        self, ledger: RedisClient, tuning: dict[str, Any], stop: dict[str, Any] | None = None
    ) -> None:
        self.ledger, self.jobs = ledger, Jobs(ledger)
        self.job = self.jobs.submit(job_spec(epochs=9, tuning=tuning, stop=stop or {}), PACKAGE).id
        self.jobs.transition(self.job, JobState.RUNNING, [JobState.STARTING], why="test")
        self.now = 0.0
        self._version = 0
        self.next_controller()

    def next_controller(self) -> None:
        beats = WorkerBeats(self.ledger)
        self.tuner = Tuner(self.job, self.ledger, beats, PERIOD, clock=lambda: self.now)

    def step(self) -> Tuned:
        self.now += PERIOD
        self.tuner.step()
        return self.tuned

    @property
    def tuned(self) -> Tuned:
        return Tunings(self.ledger, self.job).read()

    def send_heartbeat(self, worker: str, **fields: Any) -> None:
        Leases(self.ledger, self.job, worker, 60).renew(fields, [])

    def apply(self, updates: int, staleness_sum: int) -> None:
        """Report that a snapshot contains this many updates in total."""
        self._version += 1
        totals = json.dumps({"updates": updates, "staleness_sum": staleness_sum})
        assert Accounts(self.ledger, self.job).account(1, self._version, 0, totals, [])

    def evaluate(self, epoch: int, **metrics: float) -> None:
        result = {"version": epoch, "metrics": metrics, "worker": "w", "seconds": 1.0, "at": 1.0}
        self.ledger.hset(LedgerKeys(self.job).evaluations, str(epoch), json.dumps(result))

    def events(self, kind: str) -> list[str]:
        return [each["text"] for each in self.jobs.events(self.job) if each["kind"] == kind]


@pytest.fixture
def job(ledger: RedisClient) -> Callable[..., TunedJob]:
    return lambda stop=None, **tuning: TunedJob(ledger, tuning or ALL, stop)


def test_shares_follow_the_speed_and_are_reported_once(job: Callable[..., TunedJob]) -> None:
    one = job()
    one.send_heartbeat("fast", step_seconds=0.1)
    one.send_heartbeat("slow", step_seconds=0.4)
    one.send_heartbeat("new", step_seconds=None)

    assert one.step().shares == {"fast": 1.0, "slow": 0.25}
    assert one.events("tuned-local-steps") == [
        "slow takes 400.0 ms for a local step and now makes 25% of the push interval's steps"
    ]
    # A small change of the speed changes no share.
    one.send_heartbeat("slow", step_seconds=0.42)
    assert one.step().shares == {"fast": 1.0, "slow": 0.25}
    one.next_controller()
    one.step()
    assert len(one.events("tuned-local-steps")) == 1

    # Without the fast worker, the slow one is the fastest.
    one.jobs.workers.remove(one.job, "fast")
    assert one.step().shares == {"slow": 1.0}
    assert len(one.events("tuned-local-steps")) == 2


@pytest.mark.parametrize("seconds", ["soon", -1, 0, [], {}, float("nan"), float("inf"), True])
def test_worker_without_a_valid_time_is_ignored(job: Callable[..., TunedJob], seconds: Any) -> None:
    one = job()
    one.send_heartbeat("a", step_seconds=0.1)
    one.send_heartbeat("b", step_seconds=0.2)
    one.send_heartbeat("liar", step_seconds=seconds)

    assert {name: share for name, share in one.step().shares.items() if name != "liar"} == {
        "a": 1.0,
        "b": 0.5,
    }


def test_momentum_is_estimated_over_enough_updates(job: Callable[..., TunedJob]) -> None:
    one = job()
    one.apply(0, 0)
    one.step()
    one.apply(MIN_UPDATES - 1, 3 * (MIN_UPDATES - 1))
    assert one.step().implicit_momentum == 0.0

    one.apply(MIN_UPDATES, 3 * MIN_UPDATES)
    assert one.step().implicit_momentum == 0.75
    (text,) = one.events("tuned-momentum")
    assert text.startswith("the mean staleness of updates is 3.0, which acts like momentum 0.75")

    # The next controller starts a new mean and keeps the present value.
    one.next_controller()
    assert one.step().implicit_momentum == 0.75
    one.apply(2 * MIN_UPDATES, 3 * MIN_UPDATES + MIN_UPDATES)
    assert one.step().implicit_momentum == 0.5

    # A lost model is restored with fewer updates.
    one.apply(10, 10)
    assert one.step().implicit_momentum == 0.5
    one.apply(10 + MIN_UPDATES, 10)
    assert one.step().implicit_momentum == 0.0


def test_weight_of_updates_follows_the_evaluations_over_restarts(
    job: Callable[..., TunedJob],
) -> None:
    one = job()
    for epoch, accuracy in enumerate([0.8, 0.7, 0.6], start=1):
        one.evaluate(epoch, accuracy=accuracy, loss=0.1 * epoch)
        one.step()
        one.next_controller()

    assert one.tuned.mixing == 0.5
    one.evaluate(4, accuracy=0.9)
    assert one.step().mixing == pytest.approx(2**-0.5)
    worse, better = one.events("tuned-mixing")
    assert worse.startswith("validation worsened in epoch 3: accuracy 60.00%; updates now have 50%")
    assert better.startswith("validation improved again in epoch 4: accuracy 90.00%; updates now ")


def test_unknown_metric_changes_no_weight(job: Callable[..., TunedJob]) -> None:
    one = job()
    for epoch in range(1, 6):
        one.evaluate(epoch, tokens=float(epoch))

    assert one.step() == Tuned()
    for epoch in range(6, 9):
        one.evaluate(epoch, loss=float(epoch))
    assert one.step().mixing == 0.5


def test_weight_of_updates_follows_the_metric_that_the_job_names(
    job: Callable[..., TunedJob],
) -> None:
    one = job(mixing=True, stop={"metric": {"name": "perplexity", "mode": "min"}})
    for epoch, perplexity in enumerate([3.0, 4.0, 5.0], start=1):
        one.evaluate(epoch, accuracy=0.1 * epoch, perplexity=perplexity)
        one.step()

    assert one.tuned.mixing == 0.5
    (text,) = one.events("tuned-mixing")
    assert text.startswith("validation worsened in epoch 3: perplexity 5; updates now have")


def test_only_the_enabled_values_are_tuned(job: Callable[..., TunedJob]) -> None:
    one = job(mixing=True)
    one.send_heartbeat("a", step_seconds=0.1)
    one.send_heartbeat("b", step_seconds=0.9)
    one.apply(0, 0)
    one.step()
    one.apply(2 * MIN_UPDATES, 9 * MIN_UPDATES)
    one.evaluate(1, accuracy=0.5)

    assert one.step() == Tuned()


def test_paused_job_is_not_tuned(job: Callable[..., TunedJob]) -> None:
    one = job()
    one.jobs.pause(one.job)
    one.send_heartbeat("a", step_seconds=0.1)
    one.send_heartbeat("b", step_seconds=0.9)
    assert one.step() == Tuned()

    one.jobs.transition(one.job, JobState.RUNNING, [JobState.PAUSED], why="test")
    assert one.step().shares["b"] == pytest.approx(1 / 9)
