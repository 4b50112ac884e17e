"""Workers on machines: their starts, requests to leave, and the end of those that don't leave."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Sequence

from vcasgd.controller.fleet.fleet import Fleet
from vcasgd.controller.fleet.pools import is_joined
from vcasgd.errors import SpecError
from vcasgd.fleet.observed import Observed
from vcasgd.fleet.plan import StartWorker, StopWorker
from vcasgd.logging import bound
from vcasgd.settings import Settings
from vcasgd.store.admission import joined_environment, worker_environment
from vcasgd.store.ledger.events import NewEvent
from vcasgd.worker_names import job_of, machine_of, worker_name

log = logging.getLogger(__name__)

#: Lease times after which a worker that was asked to leave is killed.
DRAIN_LEASES = 2.0


def drain_seconds(settings: Settings) -> float:
    """Return the seconds that a worker has to leave."""
    return DRAIN_LEASES * settings.lease_seconds


class WorkerActuator:
    """Starts workers, asks them to leave, and kills those that don't."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._drain_seconds = drain_seconds(fleet.settings)
        #: Deadlines of the workers that were asked to leave, in Unix seconds.
        self._draining: dict[str, float] = {}
        #: Jobs that the machines of these workers were taken for.
        self.successors: dict[str, str] = {}

    def start(self, actions: Sequence[StartWorker], state: Observed) -> None:
        """Start workers, except those that have to back off."""
        pools = {one.id: one.pool for one in state.machines}
        due = {worker_name(each.machine_id, each.job, each.learner): each for each in actions}
        due = {name: each for name, each in due.items() if self._fleet.workplaces.may_start(name)}
        by_job: defaultdict[str, list[str]] = defaultdict(list)
        for name, action in due.items():
            by_job[action.job].append(name)
        if not due:
            return
        requests = self._fleet.jobs.requests_of(by_job)
        self._fleet.jobs.workers.remove_all(by_job)
        self._fleet.clearance.place(
            {
                job: {name: pools[due[name].machine_id] for name in names}
                for job, names in by_job.items()
            }
        )
        environments = {}
        for name, action in due.items():
            with bound(job=action.job, worker=name, request=requests[action.job]):
                log.info("start %s", name)
                try:
                    pool = pools[action.machine_id]
                    environments[name] = self._environment(name, action, pool)
                except SpecError as error:
                    log.warning("%s: %s", action, error)
        self._fleet.workplaces.start(environments)

    def _environment(self, name: str, action: StartWorker, pool: str) -> dict[str, str]:
        if not is_joined(action.machine_id):
            return worker_environment(self._fleet.settings, action.job, name)
        volunteer = self._fleet.clearance.is_volunteer(pool)
        return joined_environment(self._fleet.settings, action.job, name, volunteer=volunteer)

    def stop(self, actions: Sequence[StopWorker]) -> None:
        """Ask workers to leave."""
        new = {each.name: each.reason for each in actions if each.name not in self._draining}
        taken = [each for each in actions if each.name in new and each.successor]
        requests = self._fleet.jobs.requests_of({job_of(name) for name in new})
        self._fleet.jobs.workers.drain((job_of(name), name) for name in new)
        # One deadline for all, so that one call ends all machines whose workers miss it.
        self._draining |= dict.fromkeys(new, self._fleet.clock() + self._drain_seconds)
        for name, reason in new.items():
            job = job_of(name)
            with bound(job=job, worker=name, request=requests[job]):
                log.info("stop %s: %s", name, reason)
        self.successors |= {each.name: each.successor for each in taken if each.successor}
        self._fleet.jobs.add_events([event for each in taken for event in preemption_events(each)])

    def kill_lingering(self, draining: Collection[str]) -> None:
        """Kill workers that did not leave in time.

        ``draining``: all that were asked to leave; an earlier controller may have asked some.
        """
        alive, now = self._fleet.workplaces.alive, self._fleet.clock()
        self._draining = dict.fromkeys(draining, now + self._drain_seconds) | self._draining
        self._draining = {name: at for name, at in self._draining.items() if name in alive}
        self.successors = {name: job for name, job in self.successors.items() if name in alive}
        for name, deadline in self._draining.items():
            if now > deadline:
                log.warning("%s did not leave in time", name)
                self._fleet.workplaces.stop(name)


def preemption_events(stop: StopWorker) -> list[NewEvent]:
    """Return the events of both jobs for a machine that one gives to the other one."""
    donor, successor, machine = job_of(stop.name), stop.successor or "", machine_of(stop.name)
    why = stop.reason.partition(", ")[2]
    details = {"machine": machine, "from": donor, "to": successor}
    given = f"{machine} goes to {successor}, {why}"
    received = f"{machine} comes from {donor}, because the job {why.removeprefix('which ')}"
    return [
        NewEvent(donor, "machine-given", given, details),
        NewEvent(successor, "machine-received", received, details),
    ]
