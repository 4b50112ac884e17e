"""Launches, evictions, and ends of machines, and starts and ends of workers on them.

Each can be executed twice.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from vcasgd.cluster.commands import WORKER_MODULES, node_command
from vcasgd.controller import MAX_HAND_IN_SECONDS
from vcasgd.controller.fleet.cloud_calls import FAILED_BOOT_SECONDS, CallKind, NotLeading
from vcasgd.controller.fleet.fleet import Fleet
from vcasgd.controller.fleet.workplaces import is_joined
from vcasgd.errors import FleetError, SpecError, VcasgdError
from vcasgd.fleet.observed import Observed
from vcasgd.fleet.plan import Blame, Launch, StartWorker, StopWorker, Terminate, market_name
from vcasgd.fleet.plan.purchases import price_of
from vcasgd.fleet.pools import JOINING_PROVIDERS, cache_name
from vcasgd.fleet.providers.base import MACHINE_ID, PYTHON, Boot, Provider
from vcasgd.logging import bound
from vcasgd.schemas.costs import Offer
from vcasgd.schemas.fleet import Machine, MachineState
from vcasgd.settings import Settings
from vcasgd.store.admission import joined_environment, worker_environment
from vcasgd.store.ledger.control import REQUEST_SECONDS
from vcasgd.store.ledger.events import NewEvent
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.untrusted import Heartbeat
from vcasgd.store.ledger.workers import WorkerBeats
from vcasgd.worker_names import job_of, machine_of, worker_name

log = logging.getLogger(__name__)


class MachineActuator:
    """Launches, evicts, and terminates machines."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        #: Calls for requests of users whose results may not be recorded yet.
        self._requests: dict[str, Future[None]] = {}

    def launch(self, action: Launch, state: Observed) -> None:
        """Request machines in a market; its provider's answer is recorded when it arrives."""
        pool = next(each for each in state.pools if each.name == action.pool)
        offers = action.matching(pool.offers or ())
        self._fleet.pools.remember([action.pool])
        provider = self._fleet.pools.providers[action.pool]
        request = partial(
            _launch,
            provider,
            action.pool,
            action.count,
            self._boot(action.pool, offers),
            action.token,
            zones=(action.zone,),
            machine_types=action.machine_types,
            spot=action.spot,
        )
        market = market_name(action.pool, action.zone, action.spot)
        take = partial(self._take_launch, action, offers)
        # While a launch is under way, the next one would have the same token.
        if self._fleet.calls.start(CallKind.LAUNCH, provider, market, request, take):
            names = [f"{action.token}/{number}" for number in range(action.count)]
            expected = self._launched(names, action, offers)
            self._fleet.cloud.order(action.token, expected, action.jobs)

    def _take_launch(self, action: Launch, offers: list[Offer], call: Future[list[str]]) -> None:
        """Record the answer to a launch."""
        cloud, costs = self._fleet.cloud, self._fleet.costs
        cloud.forget_order(action.token)
        try:
            granted = call.result()
        except NotLeading:
            raise
        except FleetError as error:
            held = cloud.held(action.pool, spot=action.spot)
            self._fleet.launches.refused(action, error, held, self._fleet.clock())
            return
        # A repeated launch gets the first answer, whose machines may have ended meanwhile.
        names = [name for name in granted if not costs.ended(name)]
        machines = self._launched(names, action, offers)
        cloud.launched(machines)
        costs.launched(machines, action.jobs)
        self._fleet.launches.granted(action)

    def _launched(
        self, names: Iterable[str], action: Launch, offers: Sequence[Offer]
    ) -> list[Machine]:
        """Return launched machines as far as they are known, at the highest price of the offers."""
        on_demand = max((offer.on_demand_price_per_hour for offer in offers), default=0.0)
        return [
            Machine(
                id=name,
                pool=action.pool,
                state=MachineState.BOOTING,
                launched_at=self._fleet.clock(),
                price_per_hour=max((price_of(o, spot=action.spot) for o in offers), default=0.0),
                spot=action.spot,
                zone=action.zone,
                on_demand_price_per_hour=on_demand,
                # Until it is listed with its type, any of those that were requested.
                hardware=offers[0].hardware if offers else None,
            )
            for name in names
        ]

    def terminate(self, actions: Sequence[Terminate]) -> None:
        """Request the end of machines, many in one call."""
        reasons: defaultdict[Provider[Any], dict[str, str]] = defaultdict(dict)
        for action in actions:
            try:
                provider = self._fleet.cloud.provider_of(action.machine_id)
            except FleetError as error:
                log.warning("%s: %s", action, error)
                continue
            reasons[provider][action.machine_id] = action.reason
        for provider, why in reasons.items():
            machines = list(why)
            for start in range(0, len(machines), provider.max_terminated):
                some = machines[start : start + provider.max_terminated]
                self._terminate(provider, {one: why[one] for one in some})

    def _terminate(self, provider: Provider[Any], reasons: Mapping[str, str]) -> None:
        request = partial(provider.terminate, *reasons)
        take = partial(self._take_end, tuple(reasons))
        # A machine is in one call at most, because the plan leaves alone those that are ending.
        about = next(iter(reasons))
        # First, so that no later controller takes their end for a loss.
        known = self._fleet.published
        rows = {
            name: known[name].model_copy(update={"ending": why}).model_dump(mode="json")
            for name, why in reasons.items()
            if name in known
        }
        self._fleet.control.update(rows, (), None)
        if self._fleet.calls.start(CallKind.TERMINATE, provider, about, request, take):
            self._fleet.cloud.end(reasons)
            self._fleet.terminated |= reasons
            for machine, reason in reasons.items():
                log.info("terminate %s: %s", machine, reason)

    def _take_end(self, machines: Sequence[str], call: Future[None]) -> None:
        """Take the answer. Raises :class:`FleetError`; the plan then decides again."""
        self._fleet.cloud.ended(machines, confirmed=call.exception() is None)
        call.result()

    def serve(self, requests: Sequence[tuple[Mapping[str, Any], bool]]) -> None:
        """Begin with requests of users, each once, unless it is late; record what comes of them."""
        open_ = {request["id"] for request, _ in requests}
        self._requests = {name: call for name, call in self._requests.items() if name in open_}
        for request, late in requests:
            with bound(request=request.get("request")):
                call = self._requests.get(request["id"])
                if call is None:
                    self._begin(request, late=late)
                elif call.done():
                    # The ledger did not answer when the call ended.
                    self._take_request(request, call)

    def _begin(self, request: Mapping[str, Any], *, late: bool) -> None:
        """Request the eviction or the end of a machine, once it is known which machines exist."""
        machine, kill = request.get("machine", ""), bool(request.get("kill"))
        cloud = self._fleet.cloud
        try:
            if request["kind"] != "evict":
                raise FleetError(f"unknown request {request['kind']}")
            if late:
                why = f"no controller took the request within {REQUEST_SECONDS:.0f} s"
                raise FleetError(why, remedy="check vcasgd status, and try again")
            if not (cloud.complete or cloud.has(machine)):
                return
            if not cloud.has(machine) and self._fleet.costs.ended(machine):
                # An earlier controller may have ended it, and died before it recorded the result.
                self._finish(request, None)
                return
            provider = cloud.provider_of(machine)
        except FleetError as error:
            self._finish(request, error)
            return

        def end() -> None:
            # Also those that waited for a thread meanwhile.
            cloud.check(provider)
            if kill:
                provider.kill(machine)
            else:
                provider.evict(machine, request.get("notice_seconds"))

        take = partial(self._take_request, request)
        # Otherwise too many calls, or one for this machine, are under way.
        if call := self._fleet.calls.start(CallKind.REQUEST, provider, machine, end, take):
            log.info("request: %s %s", "kill" if kill else "evict", machine)
            self._requests[request["id"]] = call

    def _take_request(self, request: Mapping[str, Any], call: Future[None]) -> None:
        error = call.exception()
        assert error is None or isinstance(error, VcasgdError), "see CloudCalls"
        if isinstance(error, NotLeading):
            # The controller that leads next begins with it, perhaps this one.
            self._requests.pop(request["id"], None)
        else:
            self._finish(request, error)

    def _finish(self, request: Mapping[str, Any], error: VcasgdError | None) -> None:
        if error is not None:
            log.warning("%s %s: %s", request["kind"], request.get("machine"), error)
        self._fleet.control.finish(request, error)

    def record_failed_boot(
        self, blame: Blame, waits: tuple[float, float] = FAILED_BOOT_SECONDS
    ) -> None:
        """Block the market of a machine that never joined, and tell the job that pays for it.

        Once: while a machine is not ended, it fails again in each round.
        """
        name, job = blame.machine_id, self._fleet.costs.payer(blame.machine_id)
        if job is not None:
            text = f"{name} of pool {blame.pool} {blame.reason}"
            details = {"machine": name, "pool": blame.pool, "why": blame.reason}
            if not self._fleet.jobs.announce(job, f"boot {name}", "boot-failed", text, **details):
                return
        self._fleet.launches.boot_failed(blame, self._fleet.clock(), waits)

    def _boot(self, pool: str, offers: list[Offer]) -> Boot:
        spec = self._fleet.pools.specs[pool]
        if spec.provider in JOINING_PROVIDERS:
            return agent_boot(self._fleet.settings)
        return node_boot(
            self._fleet.settings,
            local=spec.provider == "local",
            pool=pool,
            labels=spec.labels,
            # The smallest of several types; a worker's threads use the cores beyond that anyway.
            cpus=min((each.cpus for each in offers), default=1.0),
            gpus=min((each.gpus for each in offers), default=0),
        )


def _launch(provider: Provider[Any], pool: str, *arguments: Any, **options: Any) -> list[str]:
    """Launch, and log the answer at once, because it may never be collected."""
    granted = provider.launch(pool, *arguments, **options)
    log.info("launched in %s: %s", pool, ", ".join(granted))
    return granted


def node_boot(
    settings: Settings,
    *,
    local: bool,
    pool: str,
    labels: Collection[str],
    cpus: float,
    gpus: int,
) -> Boot:
    """Return the command of a new machine, which starts a node of Ray.

    It contains no credentials for servers; each worker receives its own when it is started.
    ``local``: the machine is this computer, whose folders and Python interpreter it shares. Raises
    :class:`~vcasgd.errors.SpecError` if a setting is missing.
    """
    shared = settings.ray_dir if local else None
    command = node_command(
        address=settings.required("ray_address"),
        machine_id=MACHINE_ID,
        cpus=cpus,
        gpus=gpus,
        temp_dir=shared / MACHINE_ID if shared else None,
        heartbeat=settings.heartbeat,
        token=settings.ray_token.get_secret_value() if settings.ray_token else None,
        tls=settings.ray_tls,
    )
    env = {
        "VCASGD_STORAGE_URL": settings.required("storage_url"),
        "VCASGD_HEARTBEAT": str(settings.heartbeat),
        "VCASGD_LOG_FORMAT": settings.log_format,
    }
    if not local:
        # Nothing else would end the machine if the controller never came back.
        env["VCASGD_ORPHAN_SECONDS"] = f"{settings.orphan_seconds:g}"
        return Boot((PYTHON, *command.argv[1:]), {**command.env, **env})
    env["VCASGD_CACHE_DIR"] = str(settings.home_path / "cache" / cache_name(pool, labels))
    return Boot(command.argv, {**command.env, **env}, imports=WORKER_MODULES)


def agent_boot(settings: Settings) -> Boot:
    """Return the command of a machine that joins through the gateway.

    The machine ends if the stack is gone for long. Raises :class:`~vcasgd.errors.SpecError` if
    there is no gateway.
    """
    argv = ["vcasgd", "join", settings.required("join_url"), "--machine", MACHINE_ID]
    return Boot((*argv, "--give-up", f"{settings.orphan_seconds:g}s"))


# -- workers ---------------------------------------------------------------------------------------

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
    """Starts workers, asks them to leave, kills those that don't, and removes those that have."""

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
        for action in due.values():
            # It was to be ended, and is used again.
            self._fleet.terminated.pop(action.machine_id, None)

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

    def finish_leaving(self, draining: Collection[str]) -> None:
        """Remove workers that have left, and kill those that did not in time.

        ``draining``: all that were asked to leave; an earlier controller may have asked some.
        """
        alive, now = self._fleet.workplaces.alive, self._fleet.clock()
        self._draining = dict.fromkeys(draining, now + self._drain_seconds) | self._draining
        asked = alive - self._started
        self._started.clear()
        left: defaultdict[str, list[str]] = defaultdict(list)
        for name in set(draining) - alive:
            # Those of machines that are gone are removed with them.
            if machine_of(name) in self._fleet.workplaces.nodes:
                left[job_of(name)].append(name)
        if left:
            self._fleet.jobs.workers.remove_all(left)
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
