"""A running fleet loop whose jobs include one with content that can't be read.

The job loop would end such a job within moments. Without it, the fleet loop reads the content in
every round.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator

import pytest
from pydantic import SecretStr
from support.harness import Harness
from support.training import Training
from support.waiting import await_truth

from benchmarks.measure.control.cloud import POOL, SimulatedCloud, SimulatedPools, as_cluster
from vcasgd.controller.fleet.fleet import Fleet
from vcasgd.controller.fleet.loop import FleetLoop
from vcasgd.settings import Settings
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.workers import WorkerBeats

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
        settings = Settings(
            home=harness.home,
            heartbeat=0.25,
            ledger_url=SecretStr(harness.ledger.url),
            tensors_url=SecretStr(harness.tensors.url),
            storage_url=harness.storage.url,
            ray_address="127.0.0.1:1",
        )
        ledger = harness.ledger.connection
        self.cloud = SimulatedCloud(MACHINES, [io.StringIO()])
        pools = SimulatedPools(self.cloud, MACHINES)
        fleet = Fleet(
            settings,
            ledger,
            pools,
            WorkerBeats(ledger),
            lambda: as_cluster(self.cloud),
            leads=lambda: True,
        )
        self._loop = FleetLoop(fleet)
        self._stopped = threading.Event()
        self.rounds = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self._stopped.wait(0.02):
                self._loop.round()
                self.rounds += 1
        except Exception as error:  # noqa: BLE001 - the test raises it
            self.error = error

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def await_rounds(self, number: int) -> None:
        before = self.rounds
        await_truth(lambda: self.error or self.rounds >= before + number)
        if self.error:
            raise self.error

    def workers_of(self, job: str) -> set[str]:
        return {name for name in self.cloud.workers() if name.startswith(f"{job}.")}


@pytest.fixture
def fleet(harness: Harness) -> Iterator[Callable[[], RunningFleet]]:
    started: list[RunningFleet] = []

    def start() -> RunningFleet:
        started.append(RunningFleet(harness))
        started[0].start()
        return started[0]

    yield start
    for each in started:
        each.stop()


@pytest.mark.ci
def test_the_fleet_loop_serves_other_jobs(
    harness: Harness, fleet: Callable[[], RunningFleet]
) -> None:
    # Given two jobs that train, and a fleet loop that has placed workers of both
    workers = {"min": 1, "max": MACHINES, "pools": [POOL]}
    good, hostile = (Training(harness, samples=2000, workers=workers) for _ in range(2))
    good.start(1)
    hostile.add_workers(1)
    harness.start_job_when_ready(hostile.job)
    keys, ledger = LedgerKeys(hostile.job), harness.ledger.connection
    loop = fleet()
    await_truth(lambda: loop.workers_of(good.job) and loop.workers_of(hostile.job))

    for name, (key, field, value, fatal) in CONTENT.items():
        # When one job gets content that can't be read, while all machines are lost
        before = ledger.hget(key(keys), field)
        ledger.hset(key(keys), field, value)
        assert (harness.jobs.get_many([hostile.job])[hostile.job].invalid is not None) == fatal, (
            name
        )
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
