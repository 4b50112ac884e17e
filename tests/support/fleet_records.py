"""Machines, jobs, and events for tests of the controller's fleet loop."""

from __future__ import annotations

from typing import Any

from vcasgd.schemas.fleet import Machine, MachineState
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.jobs import Jobs

NOW = 10_000.0
HOUR = 3600.0
PACKAGE = "0" * 64


def machine(name: str, launched_at: float = NOW, pool: str = "east", **more: Any) -> Machine:
    """Return a running spot machine for 1 USD per hour (on demand: 3 USD)."""
    fields: dict[str, Any] = {
        "price_per_hour": 1.0, "on_demand_price_per_hour": 3.0, "zone": "a",
        "machine_type": "small", "spot": True, **more,
    }  # fmt: skip
    return Machine(
        id=name, pool=pool, state=MachineState.RUNNING, launched_at=launched_at, notice_at=None,
        host="", **fields,
    )  # fmt: skip


def machine_row(name: str = "i-1", **fields: Any) -> dict[str, Any]:
    """Return the row of a machine in the ledger, by default of the pool ``local``."""
    known = machine(name, pool="local").model_dump(mode="json")
    return Machine.model_validate({**known, **fields}).model_dump(mode="json")


def job_spec(**fields: Any) -> JobSpec:
    """Return the smallest specification, with these fields."""
    least = {"name": "job", "task": "t:T", "epochs": 2, "subtasks_per_epoch": 3}
    return JobSpec.parse({**least, **fields})


def events_of(jobs: Jobs, job: str, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind in a job's history."""
    return [event for event in jobs.events(job) if event["kind"] == kind]
