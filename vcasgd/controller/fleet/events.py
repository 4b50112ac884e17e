"""What others see of the fleet, and what a job's history tells of its machines."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.servers import Control

#: the state of a machine that has its notice
LEAVING = "leaving"


@dataclass(frozen=True)
class FleetRow:
    """A machine as it is shown. ``job`` is the one that it works for; times are Unix seconds."""

    pool: str
    state: str
    joined: bool
    job: str | None
    launched_at: float
    notice_at: float | None
    host: str
    spot: bool
    price_per_hour: float
    zone: str = ""
    instance_type: str = ""
    on_demand_price_per_hour: float = 0.0
    advised_at: float | None = None
    was_up: bool = False
    """It has been part of the cluster at some time."""


class FleetEvents:
    """Compares each look with the one before, which survives a restart in the ledger."""

    def __init__(self, control: Control, jobs: Jobs) -> None:
        self._control = control
        self._jobs = jobs
        self._known = {name: FleetRow(**row) for name, row in control.instances().items()}
        self._ended: dict[str, str] = {}

    def pool_of(self, instance: str) -> str | None:
        row = self._known.get(instance)
        return row.pool if row else None

    def ended_by_us(self, instance: str, why: str) -> None:
        """Its end will be no loss."""
        self._ended[instance] = why

    def ends(self, present: Collection[str]) -> dict[str, str | None]:
        """Machines that are gone since the look before, and why we ended them; ``None`` where we
        did not."""
        return {name: self._ended.get(name) for name in self._known if name not in present}

    def never_joined(self, present: Collection[str]) -> dict[str, FleetRow]:
        """Machines that are gone since the look before although nobody ended them, and that were
        never of any use."""
        return {
            name: row
            for name, row in self._known.items()
            if name not in present
            and name not in self._ended
            and not row.was_up
            and row.state != LEAVING
        }

    def show(self, rows: Mapping[str, FleetRow], pools: Mapping[str, Any]) -> dict[str, str | None]:
        """Tells what changed and shows what is; returns the machines that are gone, each with
        the job that it last worked for."""
        active = set(self._jobs.active())
        now = {name: self._with_past(name, row, active) for name, row in rows.items()}
        gone = {name: row.job for name, row in self._known.items() if name not in now}
        for name, row in now.items():
            if row.job in active:
                self._tell_change(name, self._known.get(name), row)
        for name in gone:
            if self._known[name].job in active:
                self._tell_gone(name, self._known[name])
            self._ended.pop(name, None)
        self._control.publish({name: asdict(row) for name, row in now.items()}, pools)
        self._known = now
        return gone

    def _with_past(self, name: str, row: FleetRow, active: set[str]) -> FleetRow:
        # its worker is often seen dead a moment before the machine is
        before = self._known.get(name)
        if before is None:
            return row
        if row.job is None and before.job in active:
            row = replace(row, job=before.job)
        # a new controller has not seen it
        return replace(row, was_up=row.was_up or before.was_up)

    def _tell_change(self, name: str, before: FleetRow | None, row: FleetRow) -> None:
        if row.job is None:
            return
        if before is None or before.job != row.job:
            self._jobs.event(row.job, "worker-started", f"{name} works", instance=name)
        if row.state == LEAVING and (before is None or before.state != LEAVING):
            self._jobs.event(
                row.job,
                "eviction-notice",
                f"{name} will be taken away; a replacement is ordered",
                instance=name,
                at=row.notice_at,
            )
        if row.advised_at is not None and (before is None or before.advised_at is None):
            text = f"the cloud advises to leave {name}; it works on until a replacement does"
            self._jobs.event(row.job, "rebalance-advice", text, instance=name)

    def _tell_gone(self, name: str, last: FleetRow) -> None:
        if last.job is None or name in self._ended:
            return
        noticed = last.state == LEAVING
        how = "evicted" if noticed else "killed"
        if self._jobs.record_loss(last.job, name, how):
            text = f"{name} is gone, {'after a notice' if noticed else 'without a notice'}"
            self._jobs.event(last.job, f"worker-{how}", text, instance=name)
