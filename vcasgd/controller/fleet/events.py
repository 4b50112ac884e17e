"""Changes of the fleet between two observations: events for jobs, and rows for the API."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from vcasgd.fleet.providers.base import Machine, MachineState
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.events import NewEvent
from vcasgd.store.ledger.jobs import Jobs

#: Seconds between two complete writes of the published view.
WRITE_ALL_SECONDS = 60.0


class FleetEvents:
    """Compares each observation with the previous one, which the ledger keeps over a restart."""

    def __init__(
        self, control: Control, jobs: Jobs, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._control = control
        self._jobs = jobs
        self._rows = {name: Machine.from_row(row) for name, row in control.machines().items()}
        self._terminated: dict[str, str] = {}
        self._clock = clock
        self._written_at = float("-inf")
        self._pools: dict[str, Any] = {}

    def pool_of(self, machine: str) -> str | None:
        """Return the pool of a machine in the previous observation."""
        row = self._rows.get(machine)
        return row.pool if row else None

    def machines(self) -> list[Machine]:
        """Return the machines of the previous observation."""
        return list(self._rows.values())

    def unreachable(self) -> set[str]:
        """Return the machines that could not be ended at the previous observation."""
        return {name for name, row in self._rows.items() if row.problem is not None}

    def mark_terminated(self, machine: str, why: str) -> None:
        """Record that the controller terminates a machine, so that its end counts as no loss."""
        self._terminated[machine] = why

    def lost(self, present: Collection[str]) -> dict[str, str | None]:
        """Return the machines that disappeared since the previous observation.

        Each maps to the job that it last worked for.
        """
        return {name: row.job for name, row in self._rows.items() if name not in present}

    def ends(self, present: Collection[str]) -> dict[str, str | None]:
        """Return the machines that disappeared since the previous observation.

        Each maps to the controller's reason for terminating it, or to None if it did not.
        """
        return {name: self._terminated.get(name) for name in self._rows if name not in present}

    def never_joined(self, present: Collection[str]) -> dict[str, Machine]:
        """Return the machines that disappeared on their own before they joined the cluster."""
        return {
            name: row
            for name, row in self._rows.items()
            if name not in present
            and name not in self._terminated
            and not row.was_up
            and row.state is not MachineState.LEAVING
        }

    def publish(
        self, rows: Mapping[str, Machine], pools: Mapping[str, Any]
    ) -> dict[str, str | None]:
        """Write events for the changes, and the rows themselves to the ledger.

        Returns the machines that disappeared, each with the job that it last worked for.
        """
        active = set(self._jobs.active())
        # Most rows are the same objects as before.
        new = {name: row for name, row in rows.items() if row is not self._rows.get(name)}
        present = {**rows, **{name: self._with_past(name, new[name], active) for name in new}}
        lost = self.lost(present)
        news = [
            event
            for name in new
            if (row := present[name]).job in active
            for event in _changes(name, self._rows.get(name), row)
        ]
        self._jobs.add_events([*news, *self._losses(lost, active)])
        for name in lost:
            self._terminated.pop(name, None)
        self._write(present, pools)
        self._rows = present
        return lost

    def _write(self, present: Mapping[str, Machine], pools: Mapping[str, Any]) -> None:
        """Write the rows that changed, and sometimes all, in case the ledger lost some."""
        now = self._clock()
        everything = now - self._written_at >= WRITE_ALL_SECONDS
        if everything:
            self._written_at = now
        changed = {
            name: row.to_row()
            for name, row in present.items()
            if everything or ((before := self._rows.get(name)) is not row and before != row)
        }
        if everything:
            self._control.publish(changed, pools)
        else:
            removed = self._rows.keys() - present.keys()
            self._control.update(changed, removed, pools if pools != self._pools else None)
        self._pools = dict(pools)

    def _with_past(self, name: str, row: Machine, active: set[str]) -> Machine:
        before = self._rows.get(name)
        if before is None:
            return row
        if row.job is None and before.job in active:
            # The worker is often reported dead a moment before its machine is.
            row = replace(row, job=before.job)
        # A new controller has not seen the machine in the cluster itself.
        return replace(row, was_up=True) if before.was_up and not row.was_up else row

    def _losses(self, lost: Iterable[str], active: Collection[str]) -> list[NewEvent]:
        """Record the machines that active jobs lost, and return the events of new losses."""
        events = []
        for name in lost:
            row = self._rows[name]
            if row.job is not None and row.job in active and name not in self._terminated:
                noticed = row.state is MachineState.LEAVING
                how = "evicted" if noticed else "killed"
                text = f"{name} was lost {'after' if noticed else 'without'} a notice"
                event = NewEvent(row.job, f"worker-{how}", text, {"machine": name})
                events.append(((row.job, name, how), event))
        recorded = self._jobs.workers.record_losses(loss for loss, _ in events)
        return [event for (_, event), new in zip(events, recorded, strict=True) if new]


def _changes(name: str, before: Machine | None, row: Machine) -> Iterator[NewEvent]:
    """Yield the events of one machine of an active job."""
    if row.job is None:
        return
    if before is None or before.job != row.job:
        text = f"{name} works on the job"
        yield NewEvent(row.job, "worker-started", text, {"machine": name})
    leaving = MachineState.LEAVING
    if row.state is leaving and (before is None or before.state is not leaving):
        text = f"{name} received an eviction notice; a replacement is ordered"
        details = {"machine": name, "at": row.notice_at}
        yield NewEvent(row.job, "eviction-notice", text, details)
    if row.advised_at is not None and (before is None or before.advised_at is None):
        text = f"the cloud advises replacing {name}; it trains until a replacement does"
        yield NewEvent(row.job, "rebalance-advice", text, {"machine": name})
