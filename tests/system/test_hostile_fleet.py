"""A running fleet loop whose jobs include one with content that can't be read.

The job loop would end such a job within moments. Without it, the fleet loop reads the content in
every round.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.controllers import Cloud, Controllers
from support.harness import Harness
from support.training import Training
from support.waiting import await_truth

from benchmarks.measure.control.cloud import POOL
from vcasgd.store.keys import LedgerKeys

MACHINES = 4
DEEP = "[" * 100_000
HUGE = "1" + "0" * 400

#: Key, field, and value; and True if the job can't be read with it.
CONTENT = {
    "an evaluation": (lambda keys: keys.evaluations, "1", "5", True),
    "a nested evaluation": (lambda keys: keys.evaluations, "1", DEEP, True),
    "facts": (lambda keys: keys.facts, "facts", "{", True),
    "a counter": (lambda keys: keys.counters, "next", HUGE, True),
    "a nested heartbeat": (lambda keys: keys.workers, "w", DEEP, False),
    "a heartbeat of no time": (lambda keys: keys.workers, "w", f'{{"at":{HUGE}}}', False),
    "traffic": (lambda keys: keys.traffic, "pushed", "-", False),
    "a lost machine": (lambda keys: keys.vanished, "i", DEEP, False),
}


class RunningFleet(threading.Thread):
    """A fleet loop with simulated machines, without a job loop."""

    def __init__(self, harness: Harness) -> None:
        super().__init__()
        self.cloud = Cloud(MACHINES)
        self._loop = Controllers(harness.home, harness.ledger.connection).start(self.cloud)
        self.stopped = threading.Event()
        self.rounds = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self.stopped.wait(0.02):
                self._loop.round()
                self.rounds += 1
        except Exception as error:  # noqa: BLE001 - the test raises it
            self.error = error

    def await_rounds(self, number: int) -> None:
        before = self.rounds
        await_truth(lambda: self.error or self.rounds >= before + number)
        if self.error:
            raise self.error

    def workers_of(self, job: str) -> set[str]:
        return {name for name in self.cloud.workers() if name.startswith(f"{job}.")}


@contextmanager
def running_fleet(harness: Harness) -> Iterator[RunningFleet]:
    fleet = RunningFleet(harness)
    fleet.start()
    try:
        yield fleet
    finally:
        fleet.stopped.set()
        fleet.join()


@pytest.mark.ci
def test_the_fleet_loop_serves_other_jobs(harness: Harness) -> None:
    # Given two jobs that train, and a fleet loop that has placed workers of both
    workers = {"min": 1, "max": MACHINES, "pools": [POOL]}
    good, hostile = (Training(harness, samples=2000, workers=workers) for _ in range(2))
    good.start(1)
    hostile.add_workers(1)
    harness.start_job_when_ready(hostile.job)
    keys, ledger = LedgerKeys(hostile.job), harness.ledger.connection
    with running_fleet(harness) as loop:
        await_truth(lambda: loop.workers_of(good.job) and loop.workers_of(hostile.job))

        for name, (key, field, value, fatal) in CONTENT.items():
            # When one job gets content that can't be read, while all machines are lost
            before = ledger.hget(key(keys), field)
            ledger.hset(key(keys), field, value)
            invalid = harness.jobs.get_many([hostile.job])[hostile.job].invalid
            assert (invalid is not None) == fatal, name
            lost = loop.workers_of(good.job)
            loop.cloud.lose(MACHINES)

            # Then the other one gets machines and goes on
            loop.await_rounds(3)
            await_truth(lambda lost=lost: loop.workers_of(good.job) - lost)
            good.await_more_samples(good.interval)
            if before is None:
                ledger.hdel(key(keys), field)
            else:
                ledger.hset(key(keys), field, before)
            loop.await_rounds(1)

        # And the first one could have gone on, too
        assert harness.jobs.get(hostile.job).invalid is None
        await_truth(lambda: loop.workers_of(hostile.job))
        good.release()
        good.await_samples(good.total)
