"""Events about what heartbeats show: slow links, and optimizers that aren't corrected."""

from __future__ import annotations

from typing import Any

import pytest
from support.fleet_records import PACKAGE, job_spec

from vcasgd.controller.jobs.announcements import WorkerEvents
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Leases
from vcasgd.store.ledger.workers import WorkerBeats

LEASE_SECONDS = 60


class JobOfVolunteers:
    """A job, its workers, and the controller's judgement."""

    def __init__(self, ledger: RedisClient) -> None:
        self.ledger, self.jobs = ledger, Jobs(ledger)
        self.job = self.jobs.submit(job_spec(), PACKAGE).id
        self.next_controller()

    def next_controller(self) -> None:
        self.events = WorkerEvents(self.job, self.jobs, WorkerBeats(self.ledger))

    def beat(self, worker: str, **fields: Any) -> None:
        Leases(self.ledger, self.job, f"{self.job}.{worker}", LEASE_SECONDS).renew(fields, [])

    def step(self, kind: str = "slow-link") -> list[dict[str, Any]]:
        self.events.step()
        return [event["details"] for event in self.jobs.events(self.job) if event["kind"] == kind]


def test_pushes_that_take_longer_than_the_training_are_an_event_once(ledger: RedisClient) -> None:
    # Given workers that train 40 s for an update of 48 MB
    job = JobOfVolunteers(ledger)
    work = {"local_steps": 20, "step_seconds": 2.0}
    for seconds, worker in ((96.0, "slow"), (20.0, "fast"), (None, "new")):
        job.beat(worker, **work, pushes=1, pushed_bytes=48_000_000, push_seconds=seconds)
    assert job.step() == [], "an outage may have delayed it"

    # When they have pushed again
    for seconds, worker in ((90.0, "slow"), (30.0, "fast"), (None, "new")):
        job.beat(worker, **work, pushes=2, pushed_bytes=96_000_000, push_seconds=seconds)
    (event,) = job.step()

    # Then the slow link is named once, also by the next controller
    assert event == {"worker": f"{job.job}.slow", "update_bytes": 48e6, "seconds": 90.0}
    job.next_controller()
    assert len(job.step()) == 1


def test_a_short_push_is_no_event(ledger: RedisClient) -> None:
    job = JobOfVolunteers(ledger)
    for pushes in (1, 2):
        job.beat("w", local_steps=1, step_seconds=0.1, pushes=pushes, push_seconds=8.0)
        assert job.step() == []


def test_figures_of_a_hostile_worker_do_no_harm(ledger: RedisClient) -> None:
    job = JobOfVolunteers(ledger)
    for fields in (
        {"pushes": -1, "push_seconds": 99.0, "local_steps": 1, "step_seconds": 1.0},
        {"pushes": "x", "push_seconds": {}, "local_steps": [], "step_seconds": "1e999"},
        {"pushes": 2, "push_seconds": 1e300, "local_steps": 1, "step_seconds": 1e300},
    ):
        job.beat("evil", **fields)
        assert job.step() == []


@pytest.mark.parametrize(
    ("kind", "usual", "unusual", "details"),
    [
        ("optimizer-uncorrected", {"uncorrected": None}, {"uncorrected": "Lion"},
         {"optimizer": "Lion"}),
        ("optimizer-uncorrected", {"uncorrected": {"a": 1}}, {"uncorrected": "Lion"},
         {"optimizer": "Lion"}),
        ("several-ranks", {"ranks": 1}, {"ranks": 4}, {"ranks": 4}),
    ],
)  # fmt: skip
def test_what_a_heartbeat_shows_is_an_event_once(
    ledger: RedisClient, kind: str, usual: Any, unusual: Any, details: dict[str, Any]
) -> None:
    job = JobOfVolunteers(ledger)
    job.beat("i-1", **usual)
    assert job.step(kind) == []

    for worker in ("i-1", "i-2"):
        job.beat(worker, **unusual)

    (event,) = job.step(kind)
    assert event.items() >= details.items()
    job.next_controller()
    assert len(job.step(kind)) == 1
