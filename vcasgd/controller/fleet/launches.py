"""Machines: launches, evictions, and ends, each of which can be executed twice."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from vcasgd.cluster import WORKER_MODULES, node_command
from vcasgd.controller.fleet.cloud_calls import FAILED_BOOT_SECONDS, CallKind, NotLeading
from vcasgd.controller.fleet.view import Fleet
from vcasgd.errors import FleetError
from vcasgd.fleet.observed import Observed
from vcasgd.fleet.plan import Blame, Launch, Terminate, market_name
from vcasgd.fleet.plan.purchases import price_of
from vcasgd.fleet.pools import JOINING_PROVIDERS, cache_name
from vcasgd.fleet.providers.base import MACHINE_ID, PYTHON, Boot, Offer, Provider
from vcasgd.schemas.fleet import Machine, MachineState
from vcasgd.settings import Settings

log = logging.getLogger(__name__)


class MachineActuator:
    """Launches, evicts, and terminates machines."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def launch(self, action: Launch, state: Observed) -> None:
        """Request machines in a market; its provider's answer is recorded when it arrives."""
        offers = _matching_offers(action, state)
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
                notice_at=None,
                host="",
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
        reasons: defaultdict[Provider, dict[str, str]] = defaultdict(dict)
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

    def _terminate(self, provider: Provider, reasons: Mapping[str, str]) -> None:
        request = partial(provider.terminate, *reasons)
        take = partial(self._take_end, tuple(reasons))
        # A machine is in one call at most, because the plan leaves alone those that are ending.
        about = next(iter(reasons))
        if self._fleet.calls.start(CallKind.TERMINATE, provider, about, request, take):
            self._fleet.cloud.end(reasons)
            self._fleet.terminated |= reasons
            for machine, reason in reasons.items():
                log.info("terminate %s: %s", machine, reason)

    def _take_end(self, machines: Sequence[str], call: Future[None]) -> None:
        """Take the answer. Raises :class:`FleetError`; the plan then decides again."""
        self._fleet.cloud.ended(machines, confirmed=call.exception() is None)
        call.result()

    def evict(self, request: Mapping[str, Any]) -> None:
        """Request the eviction or the end of a machine, for a user, and record the result."""
        machine, kill = request["machine"], bool(request.get("kill"))
        log.info("request: %s %s", "kill" if kill else "evict", machine)
        try:
            provider = self._fleet.cloud.provider_of(machine)
            call = (
                partial(provider.kill, machine)
                if kill
                else partial(provider.evict, machine, request.get("notice_seconds"))
            )
            take = partial(self._take_request, request)
            if not self._fleet.calls.start(CallKind.REQUEST, provider, machine, call, take):
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
