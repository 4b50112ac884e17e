"""Events about what heartbeats show: slow links, and optimizers that aren't corrected."""

from __future__ import annotations

from typing import Any

from vcasgd.controller.jobs.worker_events import WorkerEvents
from vcasgd.spec.job import JobSpec
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.joined_machines import JoinedMachines, MachineFacts
from vcasgd.store.ledger.leases import Leases
from vcasgd.store.ledger.worker_beats import WorkerBeats

LEASE_SECONDS = 60


class JobOfVolunteers:
    """A job, machines with links, and the controller's judgement."""

    def __init__(self, ledger: RedisClient) -> None:
        self.ledger, self.jobs = ledger, Jobs(ledger)
        fields = {"name": "job", "task": "t:T", "epochs": 9, "subtasks_per_epoch": 1}
        self.job = self.jobs.submit(JobSpec.parse(fields), "0" * 64).id
        self.machines = JoinedMachines(ledger, LEASE_SECONDS)
        self.next_controller()

    def next_controller(self) -> None:
        beats = WorkerBeats(self.ledger)
        self.events = WorkerEvents(self.job, self.jobs, beats, self.machines)

    def machine(self, upload_mbps: float | None) -> str:
        """Join with a machine; return the name of its worker."""
        facts = MachineFacts(host="h", cpus=2, memory_mb=1, upload_mbps=upload_mbps)
        return f"{self.job}.{self.machines.join('ann', 'd', 's', None, 'volunteers', facts).name}"

    def beat(self, worker: str, **fields: Any) -> None:
        Leases(self.ledger, self.job, worker, LEASE_SECONDS).renew(fields, [])

    def step(self, kind: str = "slow-link") -> list[dict[str, Any]]:
        self.events.step()
        return [each["details"] for each in self.jobs.events(self.job) if each["kind"] == kind]


def test_a_link_that_needs_longer_than_the_training_is_an_event_once(
    ledger: RedisClient,
) -> None:
    # Given machines that train 40 s for an update of 48 MB
    job = JobOfVolunteers(ledger)
    slow, fast, unknown = (job.machine(mbps) for mbps in (4.0, 100.0, None))
    work = {"local_steps": 20, "step_seconds": 2.0}
    for worker in (slow, fast, unknown, f"{job.job}.i-1234"):
        job.beat(worker, **work)
    assert job.step() == [], "nothing has been sent yet"

    # When they have sent some
    for worker in (slow, fast, unknown, f"{job.job}.i-1234"):
        job.beat(worker, **work, pushes=2, pushed_bytes=96_000_000)
    (event,) = job.step()

    # Then the slow link is named once, also by the next controller
    assert event == {
        "worker": slow, "upload_mbps": 4.0, "update_bytes": 48e6, "seconds": 96.0
    }  # fmt: skip
    job.next_controller()
    assert len(job.step()) == 1


def test_a_short_exchange_is_no_event(ledger: RedisClient) -> None:
    job = JobOfVolunteers(ledger)
    worker = job.machine(1.0)
    # 8 s to send, 0.1 s to train
    job.beat(worker, local_steps=1, step_seconds=0.1, pushes=1, pushed_bytes=1_000_000)
    assert job.step() == []


def test_figures_of_a_hostile_worker_do_no_harm(ledger: RedisClient) -> None:
    job = JobOfVolunteers(ledger)
    worker = job.machine(4.0)
    for fields in (
        {"pushes": -1, "pushed_bytes": -5, "local_steps": 1, "step_seconds": 1.0},
        {"pushes": "x", "pushed_bytes": {}, "local_steps": [], "step_seconds": "1e999"},
        {"pushes": 1, "pushed_bytes": 2**80, "local_steps": 1, "step_seconds": 1e300},
    ):
        job.beat(worker, **fields)
        assert job.step() == []


def test_an_optimizer_that_is_not_corrected_is_an_event_once(ledger: RedisClient) -> None:
    job = JobOfVolunteers(ledger)
    job.beat(f"{job.job}.i-1", uncorrected=None)
    job.beat(f"{job.job}.i-2", uncorrected={"a": 1})
    assert job.step("optimizer-uncorrected") == []

    for worker in ("i-1", "i-2"):
        job.beat(f"{job.job}.{worker}", uncorrected="Lion")

    assert job.step("optimizer-uncorrected") == [{"optimizer": "Lion"}]
    job.next_controller()
    assert len(job.step("optimizer-uncorrected")) == 1
