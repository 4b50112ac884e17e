"""Execution of decisions; every action can be executed twice."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from vcasgd.controller.fleet.boot import agent_boot, node_boot
from vcasgd.controller.fleet.clearance import ClearancePolicy
from vcasgd.controller.fleet.cloud_cache import CloudCache
from vcasgd.controller.fleet.cloud_calls import CallKind, CloudCalls, NotLeading
from vcasgd.controller.fleet.costs import CostLedger
from vcasgd.controller.fleet.events import FleetEvents
from vcasgd.controller.fleet.joined import is_joined
from vcasgd.controller.fleet.launch_history import FAILED_BOOT_SECONDS, LaunchHistory
from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.controller.fleet.restart_backoff import RestartBackoff
from vcasgd.controller.fleet.workplaces import WorkerStart, Workplaces
from vcasgd.errors import FleetError, SpecError
from vcasgd.fleet.observed import Observed
from vcasgd.fleet.plan import (
    Blame,
    Launch,
    StartWorker,
    StopWorker,
    Terminate,
    market_name,
)
from vcasgd.fleet.plan.market import price_of
from vcasgd.fleet.pools import JOINING_PROVIDERS
from vcasgd.fleet.providers.base import Boot, Machine, MachineState, Offer, Provider
from vcasgd.logging import bound
from vcasgd.settings import Settings
from vcasgd.steady_time import steady_time
from vcasgd.store.admission import joined_environment, worker_environment
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.events import NewEvent
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.worker_names import job_of, machine_of, worker_name

log = logging.getLogger(__name__)

#: Lease times after which a worker that was asked to leave is killed.
DRAIN_LEASES = 2.0


def drain_seconds(settings: Settings) -> float:
    """Return the seconds that a worker has to leave."""
    return DRAIN_LEASES * settings.lease_seconds


class MachineActuator:
    """Launches, evicts, and terminates machines."""

    def __init__(
        self,
        settings: Settings,
        *,
        jobs: Jobs,
        pools: PoolRegistry,
        cloud: CloudCache,
        calls: CloudCalls,
        control: Control,
        launches: LaunchHistory,
        costs: CostLedger,
        events: FleetEvents,
    ) -> None:
        self._settings = settings
        self._calls = calls
        self._control = control
        self._jobs = jobs
        self._pools = pools
        self._cloud = cloud
        self._launches = launches
        self._costs = costs
        self._events = events

    def launch(self, action: Launch, state: Observed) -> None:
        """Request machines in a market; its provider's answer is recorded when it arrives."""
        offers = _matching_offers(action, state)
        self._pools.remember([action.pool])
        provider = self._pools.providers[action.pool]
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
        if self._calls.start(CallKind.LAUNCH, provider, market, request, take):
            names = [f"{action.token}/{number}" for number in range(action.count)]
            expected = [_launched_machine(name, action, offers) for name in names]
            self._cloud.order(action.token, expected, action.jobs)

    def _take_launch(self, action: Launch, offers: list[Offer], call: Future[list[str]]) -> None:
        """Record the answer to a launch."""
        self._cloud.forget_order(action.token)
        try:
            granted = call.result()
        except NotLeading:
            raise
        except FleetError as error:
            held = self._cloud.held(action.pool, spot=action.spot)
            self._launches.refused(action, error, held, steady_time())
            return
        # A repeated launch gets the first answer, whose machines may have ended meanwhile.
        fresh = [each for each in granted if not self._costs.ended(each)]
        machines = [_launched_machine(each, action, offers) for each in fresh]
        self._cloud.launched(machines, steady_time())
        self._costs.launched(machines, action.jobs)
        self._launches.granted(action)

    def terminate(self, actions: Sequence[Terminate]) -> None:
        """Request the end of machines, many in one call."""
        reasons: defaultdict[Provider, dict[str, str]] = defaultdict(dict)
        for action in actions:
            try:
                provider = self._provider_of(action.machine_id)
            except FleetError as error:
                log.warning("%s: %s", action, error)
                continue
            reasons[provider][action.machine_id] = action.reason
        for provider, why in reasons.items():
            machines = list(why)
            for start in range(0, len(machines), provider.max_terminated):
                some = machines[start : start + provider.max_terminated]
                self._terminate(provider, {one: why[one] for one in some})

    def _terminate(self, provider: Provider, reasons: Mapping[str, str]) -> None:
        request = partial(provider.terminate, *reasons)
        take = partial(self._take_end, tuple(reasons))
        # A machine is in one call at most, because the plan leaves alone those that are ending.
        if self._calls.start(CallKind.TERMINATE, provider, next(iter(reasons)), request, take):
            self._cloud.end(reasons)
            for machine, reason in reasons.items():
                log.info("terminate %s: %s", machine, reason)
                self._events.mark_terminated(machine, reason)

    def _take_end(self, machines: Sequence[str], call: Future[None]) -> None:
        """Take the answer. Raises :class:`FleetError`; the plan then decides again."""
        self._cloud.ended(machines, confirmed=call.exception() is None)
        call.result()

    def evict(self, request: Mapping[str, Any]) -> None:
        """Request the eviction or the end of a machine, for a user, and record the result."""
        machine, kill = request["machine"], bool(request.get("kill"))
        log.info("request: %s %s", "kill" if kill else "evict", machine)
        try:
            provider = self._provider_of(machine)
            call = (
                partial(provider.kill, machine)
                if kill
                else partial(provider.evict, machine, request.get("notice_seconds"))
            )
            take = partial(self._take_request, request)
            if not self._calls.start(CallKind.REQUEST, provider, machine, call, take):
                raise FleetError(
                    f"{machine}: too many requests, or one for it is under way",
                    remedy="try again in a minute",
                )
        except FleetError as error:
            self._finish(request, error)

    def _take_request(self, request: Mapping[str, Any], call: Future[None]) -> None:
        error = call.exception()
        if error is None or isinstance(error, FleetError):
            self._finish(request, error)
            return
        self._finish(request, FleetError(f"{request['machine']}: {type(error).__name__}"))
        call.result()

    def _finish(self, request: Mapping[str, Any], error: FleetError | None) -> None:
        if error is not None:
            log.warning("evict %s: %s", request["machine"], error)
        self._control.finish(request, error)

    def record_failed_boot(
        self, blame: Blame, waits: tuple[float, float] = FAILED_BOOT_SECONDS
    ) -> None:
        """Block the market of a machine that never joined, and tell the job that pays for it."""
        self._launches.boot_failed(blame, steady_time(), waits)
        job = self._costs.payer(blame.machine_id)
        if job is not None:
            text = f"{blame.machine_id} of pool {blame.pool} {blame.reason}"
            details = {"machine": blame.machine_id, "pool": blame.pool, "why": blame.reason}
            self._jobs.event(job, "boot-failed", text, **details)

    def _boot(self, pool: str, offers: list[Offer]) -> Boot:
        spec = self._pools.specs[pool]
        if spec.provider in JOINING_PROVIDERS:
            return agent_boot(self._settings)
        return node_boot(
            self._settings,
            local=spec.provider == "local",
            pool=pool,
            labels=spec.labels,
            # The smallest of several types; a worker's threads use the cores beyond that anyway.
            cpus=min((each.cpus for each in offers), default=1.0),
            gpus=min((each.gpus for each in offers), default=0),
        )

    def _provider_of(self, machine: str) -> Provider:
        """Return the provider of a machine. Raises :class:`FleetError`."""
        pool = self._events.pool_of(machine)
        provider = self._cloud.provider_of(machine) or self._pools.providers.get(pool or "")
        if provider is None:
            raise FleetError(
                f"{machine}: the provider of its pool {pool} can't be reached: "
                f"{self._pools.problems.get(pool or '', 'the pool is not known')}",
                remedy="restore the access, or end the machine at its provider",
            )
        return provider


class WorkerActuator:
    """Starts workers, asks them to leave, and kills those that don't."""

    def __init__(
        self,
        settings: Settings,
        *,
        jobs: Jobs,
        workplaces: Workplaces,
        clearance: ClearancePolicy,
        restarts: RestartBackoff,
    ) -> None:
        self._settings = settings
        self._jobs = jobs
        self._workplaces = workplaces
        self._clearance = clearance
        self._restarts = restarts
        #: Deadlines of the workers that were asked to leave, in Unix seconds.
        self._draining: dict[str, float] = {}
        #: Jobs that the machines of these workers were taken for.
        self.successors: dict[str, str] = {}

    def start(self, actions: Sequence[StartWorker], state: Observed) -> None:
        """Start workers, except those that have to back off."""
        pools = {one.id: one.pool for one in state.machines}
        due = {worker_name(each.machine_id, each.job, each.learner): each for each in actions}
        due = {name: each for name, each in due.items() if self._restarts.may_start(name)}
        by_job: defaultdict[str, list[str]] = defaultdict(list)
        for name, action in due.items():
            by_job[action.job].append(name)
        if not due:
            return
        requests = self._jobs.requests_of(by_job)
        self._jobs.workers.remove_all(by_job)
        self._clearance.place(
            {
                job: {name: pools[due[name].machine_id] for name in names}
                for job, names in by_job.items()
            }
        )
        starts = []
        for name, action in due.items():
            with bound(job=action.job, worker=name, request=requests[action.job]):
                log.info("start %s", name)
                try:
                    env = self._environment(name, action, pools[action.machine_id])
                except SpecError as error:
                    log.warning("%s: %s", action, error)
                else:
                    starts.append(WorkerStart(action.machine_id, name, env))
        self._workplaces.start(starts)

    def _environment(self, name: str, action: StartWorker, pool: str) -> dict[str, str]:
        if not is_joined(action.machine_id):
            return worker_environment(self._settings, action.job, name)
        volunteer = self._clearance.is_volunteer(pool)
        return joined_environment(self._settings, action.job, name, volunteer=volunteer)

    def stop(self, actions: Sequence[StopWorker]) -> None:
        """Ask workers to leave."""
        new = {each.name: each.reason for each in actions if each.name not in self._draining}
        taken = [each for each in actions if each.name in new and each.successor]
        requests = self._jobs.requests_of({job_of(name) for name in new})
        self._jobs.workers.drain((job_of(name), name) for name in new)
        # One deadline for all, so that one call ends all machines whose workers miss it.
        self._draining |= dict.fromkeys(new, steady_time() + drain_seconds(self._settings))
        for name, reason in new.items():
            job = job_of(name)
            with bound(job=job, worker=name, request=requests[job]):
                log.info("stop %s: %s", name, reason)
        self.successors |= {each.name: each.successor for each in taken if each.successor}
        self._jobs.add_events([event for each in taken for event in preemption_events(each)])

    def kill_lingering(self, draining: Collection[str]) -> None:
        """Kill workers that did not leave in time.

        ``draining``: all that were asked to leave; an earlier controller may have asked some.
        """
        alive, now = self._workplaces.alive, steady_time()
        deadline = now + drain_seconds(self._settings)
        self._draining = dict.fromkeys(draining, deadline) | self._draining
        self._draining = {name: at for name, at in self._draining.items() if name in alive}
        self.successors = {name: job for name, job in self.successors.items() if name in alive}
        for name, deadline in self._draining.items():
            if now > deadline:
                log.warning("%s did not leave in time", name)
                self._workplaces.stop(name)


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


def _launch(provider: Provider, pool: str, *arguments: Any, **options: Any) -> list[str]:
    """Launch, and log the answer at once, because it may never be collected."""
    granted = provider.launch(pool, *arguments, **options)
    log.info("launched in %s: %s", pool, ", ".join(granted))
    return granted


def _matching_offers(action: Launch, state: Observed) -> list[Offer]:
    """Return the offers that can answer a launch."""
    pool = next(each for each in state.pools if each.name == action.pool)
    return [
        each
        for each in pool.offers or ()
        if each.zone == action.zone and each.machine_type in action.machine_types
    ]


def _launched_machine(machine: str, action: Launch, offers: list[Offer]) -> Machine:
    """Return a launched machine as far as it is known, at the highest price of its offers."""
    return Machine(
        id=machine,
        pool=action.pool,
        state=MachineState.BOOTING,
        launched_at=steady_time(),
        notice_at=None,
        host="",
        price_per_hour=max((price_of(each, spot=action.spot) for each in offers), default=0.0),
        spot=action.spot,
        zone=action.zone,
        on_demand_price_per_hour=max(
            (each.on_demand_price_per_hour for each in offers), default=0.0
        ),
    )
