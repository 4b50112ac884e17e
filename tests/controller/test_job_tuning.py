"""What the controller decides for a job as a whole: what it tells, and when it says nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.harness import RedisServer

from vcasgd.controller.jobs.tuning import LEAST_UPDATES, Tuner
from vcasgd.spec.job import JobSpec
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Accounts, Leases
from vcasgd.store.ledger.tuning import Tuned, Tunings

PERIOD = 1.0
ALL = {"local_steps": True, "momentum": True, "mixing": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("ledger"), durable=False)
    yield server
    server.end()


class Desk:
    """One running job, and the controller's part in it."""

    def __init__(
        self, ledger: RedisClient, tuning: dict[str, Any], stop: dict[str, Any] | None = None
    ) -> None:
        self.ledger, self.jobs = ledger, Jobs(ledger)
        fields = {"name": "job", "task": "t:T", "epochs": 9, "subtasks_per_epoch": 1}
        self.job = self.jobs.submit(
            JobSpec.parse({**fields, "tuning": tuning, "stop": stop or {}}), "0" * 64
        ).id
        self.jobs.transition(self.job, JobState.RUNNING, [JobState.STARTING], why="test")
        self.now = 0.0
        self._version = 0
        self.next_controller()

    def next_controller(self) -> None:
        self.tuner = Tuner(self.job, self.ledger, PERIOD, clock=lambda: self.now)

    def step(self) -> Tuned:
        self.now += PERIOD
        self.tuner.step()
        return self.tuned

    @property
    def tuned(self) -> Tuned:
        return Tunings(self.ledger, self.job).read()

    def beat(self, worker: str, **words: Any) -> None:
        Leases(self.ledger, self.job, worker, 60).renew(words, [])

    def apply(self, updates: int, staleness_sum: int) -> None:
        """So many updates are in the snapshot, all in all."""
        self._version += 1
        totals = json.dumps({"updates": updates, "staleness_sum": staleness_sum})
        assert Accounts(self.ledger, self.job).account(1, self._version, 0, totals, [])

    def evaluate(self, epoch: int, **metrics: float) -> None:
        result = {"version": epoch, "metrics": metrics, "worker": "w", "seconds": 1.0, "at": 1.0}
        self.ledger.hset(LedgerKeys(self.job).evaluations, str(epoch), json.dumps(result))

    def events(self, kind: str) -> list[str]:
        return [each["text"] for each in self.jobs.events(self.job) if each["kind"] == kind]


@pytest.fixture
def desk(server: RedisServer) -> Callable[..., Desk]:
    server.connection.flushall()
    return lambda stop=None, **tuning: Desk(server.connection, tuning or ALL, stop)


def test_shares_are_told_once_and_change_with_the_speed(desk: Callable[..., Desk]) -> None:
    one = desk()
    one.beat("fast", step_seconds=0.1)
    one.beat("slow", step_seconds=0.4)
    one.beat("new", step_seconds=None)

    assert one.step().shares == {"fast": 1.0, "slow": 0.25}
    assert one.events("tuned-local-steps") == [
        "slow takes 400.0 ms for a local step and now makes 25% of the push interval's steps"
    ]
    # nearly the same is the same
    one.beat("slow", step_seconds=0.42)
    assert one.step().shares == {"fast": 1.0, "slow": 0.25}
    one.next_controller()
    one.step()
    assert len(one.events("tuned-local-steps")) == 1

    # when the fast one is gone, the slow one is as fast as anybody
    one.jobs.remove_worker(one.job, "fast")
    assert one.step().shares == {"slow": 1.0}
    assert len(one.events("tuned-local-steps")) == 2


@pytest.mark.parametrize("words", ["soon", -1, 0, [], {}, float("nan"), float("inf"), True])
def test_who_tells_no_time_has_no_say(desk: Callable[..., Desk], words: Any) -> None:
    one = desk()
    one.beat("a", step_seconds=0.1)
    one.beat("b", step_seconds=0.2)
    one.beat("liar", step_seconds=words)

    assert {name: share for name, share in one.step().shares.items() if name != "liar"} == {
        "a": 1.0,
        "b": 0.5,
    }


def test_momentum_is_estimated_over_enough_updates(desk: Callable[..., Desk]) -> None:
    one = desk()
    one.apply(0, 0)
    one.step()
    one.apply(LEAST_UPDATES - 1, 3 * (LEAST_UPDATES - 1))
    assert one.step().implicit_momentum == 0.0

    one.apply(LEAST_UPDATES, 3 * LEAST_UPDATES)
    assert one.step().implicit_momentum == 0.75
    (text,) = one.events("tuned-momentum")
    assert text.startswith("the mean staleness of updates is 3.0, which acts like momentum 0.75")

    # the next controller begins to average anew, and what holds goes on to hold
    one.next_controller()
    assert one.step().implicit_momentum == 0.75
    one.apply(2 * LEAST_UPDATES, 3 * LEAST_UPDATES + LEAST_UPDATES)
    assert one.step().implicit_momentum == 0.5

    # a model that was lost comes back with fewer updates
    one.apply(10, 10)
    assert one.step().implicit_momentum == 0.5
    one.apply(10 + LEAST_UPDATES, 10)
    assert one.step().implicit_momentum == 0.0


def test_the_weight_of_updates_follows_the_evaluations_whoever_looks(
    desk: Callable[..., Desk],
) -> None:
    one = desk()
    for epoch, accuracy in enumerate([0.8, 0.7, 0.6], start=1):
        one.evaluate(epoch, accuracy=accuracy, loss=0.1 * epoch)
        one.step()
        one.next_controller()

    assert one.tuned.mixing == 0.5
    one.evaluate(4, accuracy=0.9)
    assert one.step().mixing == pytest.approx(2**-0.5)
    worse, better = one.events("tuned-mixing")
    assert worse.startswith("validation worsened in epoch 3: accuracy 0.6000; updates now have 50%")
    assert better.startswith("validation improved again in epoch 4: accuracy 0.9000; updates now ")


def test_a_task_that_measures_nothing_known_changes_nothing(desk: Callable[..., Desk]) -> None:
    one = desk()
    for epoch in range(1, 6):
        one.evaluate(epoch, perplexity=float(epoch))

    assert one.step() == Tuned()
    for epoch in range(6, 9):
        one.evaluate(epoch, loss=float(epoch))
    assert one.step().mixing == 0.5


def test_weight_of_updates_follows_the_metric_that_the_job_names(
    desk: Callable[..., Desk],
) -> None:
    one = desk(mixing=True, stop={"metric": {"name": "perplexity", "mode": "min"}})
    for epoch, perplexity in enumerate([3.0, 4.0, 5.0], start=1):
        one.evaluate(epoch, accuracy=0.1 * epoch, perplexity=perplexity)
        one.step()

    assert one.tuned.mixing == 0.5
    (text,) = one.events("tuned-mixing")
    assert text.startswith("validation worsened in epoch 3: perplexity 5.0000; updates now have")


def test_only_what_was_asked_for_is_decided(desk: Callable[..., Desk]) -> None:
    one = desk(mixing=True)
    one.beat("a", step_seconds=0.1)
    one.beat("b", step_seconds=0.9)
    one.apply(0, 0)
    one.step()
    one.apply(2 * LEAST_UPDATES, 9 * LEAST_UPDATES)
    one.evaluate(1, accuracy=0.5)

    assert one.step() == Tuned()


def test_a_job_that_rests_is_left_alone(desk: Callable[..., Desk]) -> None:
    one = desk()
    one.jobs.pause(one.job)
    one.beat("a", step_seconds=0.1)
    one.beat("b", step_seconds=0.9)
    assert one.step() == Tuned()

    one.jobs.transition(one.job, JobState.RUNNING, [JobState.PAUSED], why="test")
    assert one.step().shares["b"] == pytest.approx(1 / 9)
