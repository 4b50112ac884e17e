"""Workers on machines: their starts, requests to leave, and the end of those that don't leave."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from vcasgd.controller import MAX_HAND_IN_SECONDS
from vcasgd.controller.fleet.pools import is_joined
from vcasgd.controller.fleet.view import Fleet
from vcasgd.errors import SpecError
from vcasgd.fleet.observed import Observed
from vcasgd.fleet.plan import StartWorker, StopWorker
from vcasgd.logging import bound
from vcasgd.settings import Settings
from vcasgd.store.admission import joined_environment, worker_environment
from vcasgd.store.ledger.events import NewEvent
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.untrusted import Heartbeat
from vcasgd.store.ledger.workers import WorkerBeats
from vcasgd.worker_names import job_of, machine_of, worker_name

log = logging.getLogger(__name__)

#: Lease times after which a worker that was asked to leave is killed.
DRAIN_LEASES = 2.0
#: Heartbeats that a worker misses until a stack that stops no longer waits for it.
SILENT_HEARTBEATS = 4.0
#: Seconds between two looks at workers that hand in.
LOOK_SECONDS = 0.1


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
        #: Workers that were started in this round; they have the names of those before them.
        self._started: set[str] = set()
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
        self._started |= environments.keys()

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
        asked = alive - self._started
        self._started.clear()
        self._draining = {name: at for name, at in self._draining.items() if name in asked}
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


def hand_in(jobs: Jobs, beats: WorkerBeats, settings: Settings) -> None:
    """Ask all workers to push what they have and leave, and wait until they have.

    Call it while no worker is started. The wait is bounded (:func:`hand_in_seconds`), and ends
    earlier for workers that fall silent. A job whose workers did not hand in gets an event.
    """
    asked: set[tuple[str, str]] = set()
    #: When each worker's last heartbeat arrived here, by :func:`time.monotonic`.
    heard: dict[tuple[str, str], tuple[Heartbeat, float]] = {}
    started, late = time.monotonic(), list[tuple[str, str]]()
    while True:
        found = {
            (job, name): beat
            for job, workers in beats.of_many(jobs.active()).items()
            for name, beat in workers.items()
        }
        now = time.monotonic()
        heard = {
            key: heard[key] if key in heard and heard[key][0] == beat else (beat, now)
            for key, beat in found.items()
        }
        jobs.workers.drain(found.keys() - asked)
        asked |= found.keys()
        silent = now - SILENT_HEARTBEATS * settings.heartbeat
        late = [key for key, (beat, at) in heard.items() if at > silent and not beat.has_left]
        if not late or now - started > hand_in_seconds(found.values(), settings):
            break
        time.sleep(LOOK_SECONDS)
    log.info("%d of %d workers have handed in", len(asked) - len(late), len(asked))
    for job in {job for job, _ in late}:
        names = sorted(name for of, name in late if of == job)
        text = f"{', '.join(names)} did not hand in in time; their last steps are trained again"
        jobs.event(job, "not-handed-in", text, workers=names)


def hand_in_seconds(beats: Iterable[Heartbeat], settings: Settings) -> float:
    """Return the seconds until all of these workers have heard that they have to leave, ended their
    local step, and pushed; at most :data:`~vcasgd.controller.MAX_HAND_IN_SECONDS`."""
    slowest = max(
        (2 * (each.step_seconds or 0) + (each.push_seconds or 0) for each in beats), default=0.0
    )
    usual = 2 * settings.heartbeat + settings.lease_seconds
    return min(usual + slowest, MAX_HAND_IN_SECONDS)
