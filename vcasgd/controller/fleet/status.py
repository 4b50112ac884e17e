"""Status of the fleet as the API shows it."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vcasgd.controller.fleet.cloud_cache import CloudCache
from vcasgd.controller.fleet.events import FleetEvents
from vcasgd.controller.fleet.machine_timeline import TimelineRecorder
from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.fleet.observed import Observed
from vcasgd.fleet.plan import Blame
from vcasgd.fleet.pool_rows import to_row
from vcasgd.fleet.providers.base import Machine
from vcasgd.steady_time import steady_time
from vcasgd.store.ledger.events import NewEvent
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import LostWorkers
from vcasgd.worker_names import machine_of, worker_name


class StatusPublisher:
    """Frees the leases of machines that disappeared, and publishes each observation.

    ``ray_dir``: folder that holds one Ray folder per machine of this computer, if there are any.
    """

    def __init__(
        self,
        *,
        jobs: Jobs,
        pools: PoolRegistry,
        cloud: CloudCache,
        events: FleetEvents,
        lost: LostWorkers,
        timeline: TimelineRecorder,
        ray_dir: Path | None,
    ) -> None:
        self._jobs = jobs
        #: Reasons of active jobs that are in the ledger.
        self._waiting: dict[str, str] = {}
        self._pools = pools
        self._cloud = cloud
        self._events = events
        self._lost = lost
        self._timeline = timeline
        self._ray_dir = ray_dir
        #: Why jobs may have fewer machines than they could use, as of the last observation.
        self._limited: dict[str, str] = {}
        #: Workers of machines that disappeared, by job.
        self._gone: dict[str, set[str]] = {}
        #: Row of each machine, and what it was made of.
        self._rows: dict[str, tuple[tuple[Any, ...], Machine]] = {}

    def failed_boots(self, state: Observed) -> list[Blame]:
        """Return the machines that disappeared before they joined; call it before publishing."""
        present = {one.id for one in state.machines}
        return [
            Blame(name, row.pool, row.zone, row.spot, "disappeared before it joined")
            for name, row in self._events.never_joined(present).items()
        ]

    def release(self, state: Observed) -> None:
        """Free the leases of workers whose machine disappeared."""
        of_job: defaultdict[str, set[str]] = defaultdict(set)
        for machine, job in self._events.lost({one.id for one in state.machines}).items():
            if job is not None:
                of_job[job].add(machine)
        self._gone = {}
        for job, names in self._jobs.workers.names_of(of_job).items() if of_job else ():
            # Learners beside the first report too.
            reported = {name for name in names if machine_of(name) in of_job[job]}
            self._gone[job] = reported | {worker_name(one, job) for one in of_job[job]}
        self._lost.report(self._gone)

    def publish(self, state: Observed) -> None:
        """Publish machines, pools, timelines, and events of one observation.

        Call :meth:`release` first.
        """
        job_of = {worker.machine_id: worker.job for worker in state.workers if worker.alive}
        rows = self._machine_rows(state, job_of)
        self._timeline.record(state, self._events.ends(rows.keys()), steady_time())
        self._jobs.add_events(limit_events(self._limited, state))
        self._limited = {job.job: job.limited for job in state.jobs if job.limited}
        known = self._events.unreachable()
        new = {name: row for name, row in rows.items() if row.problem and name not in known}
        active = {each.job for each in state.jobs}
        payers = {name: job for name, job in state.payers.items() if job in active}
        self._jobs.add_events(unreachable_events(new, payers))
        lost = self._events.publish(rows, self._pool_rows(state))
        if self._gone:
            self._jobs.workers.remove_all(self._gone)
        if self._ray_dir is not None:
            for machine in lost:
                shutil.rmtree(self._ray_dir / machine, ignore_errors=True)

    def publish_waiting(self, state: Observed, reasons: Mapping[str, str]) -> None:
        """Publish why jobs have fewer machines than they could use, as far as that has changed."""
        waiting = {job.job: reasons.get(job.job, "") for job in state.jobs}
        changed = {job: why for job, why in waiting.items() if self._waiting.get(job) != why}
        if changed:
            self._jobs.set_waiting(changed)
        self._waiting = waiting

    def _machine_rows(self, state: Observed, job_of: Mapping[str, str]) -> dict[str, Machine]:
        """Return the rows of all machines; those of unchanged ones are the previous ones."""
        nodes, joined = state.nodes or frozenset(), state.history.joined
        before, self._rows = self._rows, {}
        for one in state.machines:
            name = one.id
            removed = one.pool not in self._pools.specs
            problem = self._cloud.problem(one)
            key = one, name in nodes, job_of.get(name), name in joined, removed, problem
            if (known := before.get(name)) and known[0] == key:
                self._rows[name] = known
                continue
            row = replace(
                one,
                joined=name in nodes,
                was_up=name in joined,
                job=job_of.get(name),
                pool_removed=removed,
                problem=problem,
            )
            self._rows[name] = key, row
        return {name: row for name, (_, row) in self._rows.items()}

    def _pool_rows(self, state: Observed) -> dict[str, dict[str, object]]:
        machines = Counter(one.pool for one in state.machines)
        warm = Counter(one.pool for one in state.machines if _is_warm(one, state))
        return {
            view.name: to_row(
                view,
                position=position,
                provider=self._pools.specs[view.name].provider,
                labels=self._pools.specs[view.name].labels,
                trust=self._pools.specs[view.name].trust,
                machines=machines[view.name],
                idle=warm[view.name],
            )
            for position, view in enumerate(state.pools)
        }


def limit_events(before: Mapping[str, str], state: Observed) -> list[NewEvent]:
    """Return the events of jobs that a limit of their user now gives fewer machines.

    ``before``: the reasons of the jobs that it did before.
    """
    return [
        NewEvent(
            job.job,
            "machines-limited",
            f"it may have {job.desired} machines: {job.limited}",
            {"machines": job.desired},
        )
        for job in state.jobs
        if job.limited is not None and before.get(job.job) != job.limited
    ]


def unreachable_events(
    machines: Mapping[str, Machine], payers: Mapping[str, str]
) -> list[NewEvent]:
    """Return the events of the jobs that pay for machines that can't be ended."""
    return [
        NewEvent(
            job,
            "machine-unreachable",
            f"{name} may still run and cost money: its pool {row.pool} was removed, and it can't "
            f"be ended: {row.problem}; restore the access to its provider",
            {"machine": name, "pool": row.pool, "why": row.problem},
        )
        for name, row in machines.items()
        if (job := payers.get(name))
    ]


def _is_warm(one: Machine, state: Observed) -> bool:
    """Return True if a job could get the machine at once."""
    leaving = one.notice_at is not None or one.advised_at is not None
    return one.id in state.history.idle and not leaving
