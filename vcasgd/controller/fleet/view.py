"""The view of a fleet as the API shows it, and what changes in it."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from vcasgd.controller.fleet.fleet import Fleet
from vcasgd.controller.fleet.machine_timeline import TimelineRecorder
from vcasgd.controller.fleet.workplaces import LOST_HEARTBEATS
from vcasgd.fleet.observed import Observed
from vcasgd.fleet.plan import Blame
from vcasgd.fleet.plan.decide import Waiting
from vcasgd.fleet.pools import JOIN
from vcasgd.schemas.fleet import Machine, MachineState
from vcasgd.store.ledger.events import NewEvent
from vcasgd.store.ledger.leases import LostWorkers
from vcasgd.store.ledger.machines import JoinedMachines
from vcasgd.worker_names import machine_of, worker_name

#: Heartbeats for which a machine without a worker may be one that dies; later, its job has left it.
KEPT_HEARTBEATS = 2 * LOST_HEARTBEATS
#: Seconds between two complete writes of the published view.
WRITE_ALL_SECONDS = 60.0


class FleetView:
    """Compares each observation with the previous one, which the ledger keeps over a restart."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lost = LostWorkers(fleet.ledger)
        self._timeline = TimelineRecorder(fleet.ledger)
        #: Sources of the published machines: each as observed, and the fields that were added.
        self._sources: dict[str, tuple[Machine, dict[str, Any]]] = {}
        #: Workers of machines that disappeared, by job.
        self._gone: dict[str, set[str]] = {}
        #: Why jobs may have, and do have, fewer machines than they could use.
        self._limited: dict[str, str] = {}
        self._waiting: dict[str, Waiting | None] = {}
        self._pools: dict[str, Any] = {}
        self._written_at = float("-inf")

    # -- before the round acts ---------------------------------------------------------------------

    def release(self, state: Observed) -> None:
        """Free the leases of workers whose machine disappeared."""
        of_job: defaultdict[str, set[str]] = defaultdict(set)
        for name, one in self._disappeared(state).items():
            if one.job is not None:
                of_job[one.job].add(name)
        self._gone = {}
        for job, names in self._fleet.jobs.workers.names_of(of_job).items() if of_job else ():
            # Learners beside the first report too.
            reported = {name for name in names if machine_of(name) in of_job[job]}
            self._gone[job] = reported | {worker_name(one, job) for one in of_job[job]}
        self._lost.report(self._gone)

    def failed_boots(self, state: Observed) -> list[Blame]:
        """Return the machines that disappeared on their own before they joined the cluster."""
        return [
            Blame(name, one.pool, one.zone, one.spot, "disappeared before it joined")
            for name, one in self._disappeared(state).items()
            if name not in self._fleet.terminated
            and not one.was_up
            and one.state is not MachineState.LEAVING
        ]

    def _disappeared(self, state: Observed) -> dict[str, Machine]:
        present = {one.id for one in state.machines}
        return {name: one for name, one in self._fleet.published.items() if name not in present}

    # -- publication -------------------------------------------------------------------------------

    def publish(self, state: Observed, waiting: Mapping[str, Waiting]) -> None:
        """Publish machines, pools, timelines, and events of one observation.

        ``waiting``: why jobs have fewer machines than they could use. Call :meth:`release` first.
        """
        jobs, terminated = self._fleet.jobs, self._fleet.terminated
        before, lost = self._fleet.published, self._disappeared(state)
        left = self._left(lost)
        ends = {name: terminated.get(name) or left.get(name) for name in lost}
        self._timeline.record(state, ends, self._fleet.clock(), before)
        active = set(jobs.active())
        machines = self._rows(state, active)
        changed = {name: one for name, one in machines.items() if one is not before.get(name)}
        events = [
            *self._limits(state),
            *self._unreachable(changed, state),
            *(
                event
                for name, one in changed.items()
                if one.job in active
                for event in _changes(before.get(name), one)
            ),
            *self._losses(lost, left, active),
        ]
        jobs.add_events(events)
        self._write(machines, self._pool_rows(state))
        self._fleet.published = machines
        self._publish_waiting(state, waiting)
        if self._gone:
            jobs.workers.remove_all(self._gone)
        for name in lost:
            terminated.pop(name, None)
            if (ray_dir := self._fleet.settings.ray_dir) is not None:
                shutil.rmtree(ray_dir / name, ignore_errors=True)

    def _rows(self, state: Observed, active: Collection[str]) -> dict[str, Machine]:
        """Return all machines as they are published; unchanged ones are the previous objects."""
        job_of = {worker.machine_id: worker.job for worker in state.workers if worker.alive}
        nodes, joined = state.nodes, state.history.joined
        idle = self._fleet.clock() - KEPT_HEARTBEATS * self._fleet.settings.heartbeat
        before, self._sources = self._sources, {}
        rows = {}
        for one in state.machines:
            name, known = one.id, self._fleet.published.get(one.id)
            row: dict[str, Any] = {
                "joined": name in nodes,
                "was_up": name in joined,
                "job": job_of.get(name),
                "pool_removed": one.pool not in self._fleet.pools.specs,
                "ending": self._fleet.terminated.get(name),
                "problem": self._fleet.cloud.problem(one),
            }
            self._sources[name] = one, row
            if known and known.job == row["job"] and before.get(name) == (one, row):
                rows[name] = known
            else:
                left = state.history.idle.get(name, idle) < idle
                kept = frozenset[str]() if left else active
                rows[name] = _with_past(one.model_copy(update=row), known, kept)
        return rows

    def _write(self, machines: Mapping[str, Machine], pools: dict[str, Any]) -> None:
        """Write the machines that changed, and sometimes all, in case the ledger lost some."""
        now, before = self._fleet.clock(), self._fleet.published
        if now - self._written_at >= WRITE_ALL_SECONDS:
            self._written_at = now
            rows = {name: one.model_dump(mode="json") for name, one in machines.items()}
            self._fleet.control.publish(rows, pools)
        else:
            changed = {
                name: one.model_dump(mode="json")
                for name, one in machines.items()
                if (known := before.get(name)) is not one and known != one
            }
            removed = before.keys() - machines.keys()
            self._fleet.control.update(changed, removed, pools if pools != self._pools else None)
        self._pools = pools

    def _pool_rows(self, state: Observed) -> dict[str, Any]:
        machines = Counter(one.pool for one in state.machines)
        # Those that a job could get at once.
        warm = Counter(
            one.pool
            for one in state.machines
            if one.id in state.history.idle and one.notice_at is None and one.advised_at is None
        )
        return {
            pool.name: replace(pool, machines=machines[pool.name], idle=warm[pool.name]).to_row(
                position
            )
            for position, pool in enumerate(state.pools)
        }

    def _publish_waiting(self, state: Observed, reasons: Mapping[str, Waiting]) -> None:
        waiting = {job.job: reasons.get(job.job) for job in state.jobs}
        changed = {
            job: vars(why) if why else {}
            for job, why in waiting.items()
            if job not in self._waiting or self._waiting[job] != why
        }
        if changed:
            self._fleet.jobs.set_waiting(changed)
        self._waiting = waiting

    # -- events ------------------------------------------------------------------------------------

    def _limits(self, state: Observed) -> Iterator[NewEvent]:
        """Yield the events of jobs that a limit of their user now gives fewer machines."""
        before = self._limited
        self._limited = {job.job: job.limited for job in state.jobs if job.limited}
        for job in state.jobs:
            if job.limited and before.get(job.job) != job.limited:
                text = f"it may have {job.desired} machines: {job.limited}"
                yield NewEvent(job.job, "machines-limited", text, {"machines": job.desired})

    def _unreachable(self, machines: Mapping[str, Machine], state: Observed) -> Iterator[NewEvent]:
        """Yield the events of jobs that pay for machines that now can't be ended."""
        active = {demand.job for demand in state.jobs}
        for name, one in machines.items():
            known = self._fleet.published.get(name)
            job = state.payers.get(name)
            if job in active and one.problem and not (known and known.problem):
                yield NewEvent(
                    job,
                    "machine-unreachable",
                    f"{name} may still run and cost money: its pool {one.pool} was removed, and it "
                    f"can't be ended: {one.problem}; restore the access to its provider",
                    {"machine": name, "pool": one.pool, "why": one.problem},
                )

    def _left(self, lost: Mapping[str, Machine]) -> dict[str, str]:
        """Return why machines are no loss whose owners let them leave, by machine.

        One that leaves quickly was never observed while it did, but it has removed itself.
        """
        specs = self._fleet.pools.specs
        joined = JoinedMachines(self._fleet.ledger, self._fleet.settings.lease_seconds)
        gone = [
            name
            for name, one in lost.items()
            if one.state is not MachineState.LEAVING
            and one.pool in specs
            and specs[one.pool].provider == JOIN
            and joined.get(name) is None
        ]
        return dict.fromkeys([*(n for n, one in lost.items() if one.leaves), *gone], "it left")

    def _losses(
        self, lost: Mapping[str, Machine], left: Collection[str], active: Collection[str]
    ) -> list[NewEvent]:
        """Record the machines that active jobs lost, and return the events of new losses.

        Those that ``left`` only have an event.
        """
        events, ends = [], []
        for name, one in lost.items():
            if one.job is None or one.job not in active or name in self._fleet.terminated:
                continue
            if name in left:
                text = f"{name} has left, as its owner wanted"
                ends.append(NewEvent(one.job, "worker-left", text, {"machine": name}))
            else:
                noticed = one.state is MachineState.LEAVING
                how = "evicted" if noticed else "killed"
                text = f"{name} was lost {'after' if noticed else 'without'} a notice"
                event = NewEvent(one.job, f"worker-{how}", text, {"machine": name})
                events.append(((one.job, name, how), event))
        recorded = self._fleet.jobs.workers.record_losses(loss for loss, _ in events)
        return ends + [event for (_, event), new in zip(events, recorded, strict=True) if new]


def _with_past(row: Machine, before: Machine | None, jobs: Collection[str]) -> Machine:
    """Return a machine with what only the previous observation knows.

    ``jobs``: those of which it may have lost a worker.
    """
    if before is None:
        return row
    if row.job is None and before.job in jobs:
        # The worker is often reported dead a moment before its machine is.
        row = row.model_copy(update={"job": before.job})
    # A new controller has not seen the machine in the cluster itself.
    found_up = before.was_up and not row.was_up
    return row.model_copy(update={"was_up": True}) if found_up else row


def _changes(before: Machine | None, row: Machine) -> Iterator[NewEvent]:
    """Yield the events of one machine of an active job."""
    name, job = row.id, row.job or ""
    if before is None or before.job != job:
        yield NewEvent(job, "worker-started", f"{name} works on the job", {"machine": name})
    leaving = MachineState.LEAVING
    if row.leaves:
        return
    if row.state is leaving and (before is None or before.state is not leaving):
        text = f"{name} received an eviction notice; a replacement is ordered"
        details = {"machine": name, "at": row.notice_at}
        yield NewEvent(job, "eviction-notice", text, details)
    if row.advised_at is not None and (before is None or before.advised_at is None):
        text = f"the cloud advises replacing {name}; it trains until a replacement does"
        yield NewEvent(job, "rebalance-advice", text, {"machine": name})
