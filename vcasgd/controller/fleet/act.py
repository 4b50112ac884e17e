"""Carries out what was decided; every action may be carried out twice."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from vcasgd.controller.fleet.boot import node_boot
from vcasgd.controller.fleet.context import DRAIN_LEASES, ControllerContext
from vcasgd.controller.fleet.names import job_of, worker_name
from vcasgd.controller.fleet.observe import Observer
from vcasgd.controller.fleet.status import stillborn
from vcasgd.errors import ClusterError, FleetError
from vcasgd.fleet.observed import Observed
from vcasgd.fleet.plan import Action, Blame, Launch, StartWorker, StopWorker, Terminate
from vcasgd.fleet.plan.prices import price_of
from vcasgd.fleet.providers.base import Boot, Instance, InstanceState, Offer, Provider
from vcasgd.logging import bound
from vcasgd.store.admission import worker_environment
from vcasgd.worker import main as agent

log = logging.getLogger(__name__)


class Actuator:
    """Launches, starts, stops and terminates."""

    def __init__(self, parts: ControllerContext, lookout: Observer) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._jobs = parts.jobs
        self._lookout = lookout
        self._draining: dict[str, float] = {}

    def act(self, action: Action, state: Observed) -> None:
        """``state``: that it was decided from."""
        try:
            match action:
                case Launch():
                    self._launch(action, state)
                case Blame():
                    stillborn(self._parts, action)
                case StartWorker():
                    self._start_worker(action, state)
                case StopWorker():
                    self._stop_worker(action)
                case Terminate():
                    log.info("terminate %s: %s", action.instance_id, action.reason)
                    self._parts.chronicle.ended_by_us(action.instance_id, action.reason)
                    self._provider_of(action.instance_id).terminate(action.instance_id)
                    self._parts.listing.forget()
        except (ClusterError, FleetError) as error:
            # the next round sees what came of it, and decides anew
            log.warning("%s: %s", action, error)

    def kill_lingering(self) -> None:
        """Those that were asked to leave and did not."""
        alive, cluster = self._lookout.alive, self._lookout.cluster
        self._draining = {name: at for name, at in self._draining.items() if name in alive}
        for name, deadline in self._draining.items():
            if time.time() > deadline and cluster is not None:
                log.warning("%s did not leave in time", name)
                cluster.stop_worker(name)

    def serve_requests(self) -> None:
        """What people asked for."""
        for request in self._parts.control.take_requests():
            with bound(request=request.get("request")):
                if request["kind"] == "evict":
                    self._evict(request["instance"], request)
                else:
                    log.warning("unknown request %s", request["kind"])

    def _evict(self, instance: str, how: Mapping[str, Any]) -> None:
        log.info("asked to %s %s", "kill" if how.get("kill") else "evict", instance)
        try:
            provider = self._provider_of(instance)
            if how.get("kill"):
                provider.kill(instance)
            else:
                provider.evict(instance, how.get("notice_seconds"))
        except FleetError as error:
            log.warning("evict %s: %s", instance, error)

    def _launch(self, action: Launch, state: Observed) -> None:
        offers = _offers(action, state)
        try:
            granted = self._parts.estate.providers[action.pool].launch(
                action.pool,
                action.count,
                self._boot(action.pool, offers),
                action.token,
                zones=None if action.zone is None else (action.zone,),
                instance_types=action.instance_types,
                spot=action.spot,
            )
        except FleetError as error:
            kind = (
                self._parts.estate.pools[action.pool].spot if action.spot is None else action.spot
            )
            held = sum(one.pool == action.pool and one.spot == kind for one in state.staying())
            self._parts.memory.refused(action, error, held, time.time())
            return
        log.info("launched in %s: %s", action.pool, ", ".join(granted))
        # a launch that was not recorded is answered as it was the first time
        fresh = [each for each in granted if not self._parts.books.ended(each)]
        machines = [_machine(each, action, offers) for each in fresh]
        self._lookout.launched(machines)
        self._parts.books.launched(machines, action.jobs)
        self._parts.memory.granted(action)

    def _boot(self, pool: str, offers: list[Offer]) -> Boot:
        return node_boot(
            self._settings,
            local=self._parts.estate.pools[pool].provider == "local",
            pool=pool,
            labels=self._parts.estate.pools[pool].labels,
            # of several types the smallest: what is more is still used by the worker's threads
            cpus=min((each.cpus for each in offers), default=1.0),
            gpus=min((each.gpus for each in offers), default=0),
        )

    def _start_worker(self, action: StartWorker, state: Observed) -> None:
        cluster = self._lookout.cluster
        assert cluster is not None
        name = worker_name(action.instance_id, action.job, action.learner)
        if not self._parts.crashes.may_start(name):
            return
        with bound(job=action.job, worker=name, request=self._jobs.request_of(action.job)):
            log.info("start %s", name)
        arguments = {"job": action.job, "worker": name, "instance": action.instance_id}
        self._jobs.remove_worker(action.job, name)
        pool = next(one.pool for one in state.instances if one.id == action.instance_id)
        self._parts.guard.place(action.job, name, pool)
        env = worker_environment(self._settings, action.job, name)
        cluster.start_worker(action.instance_id, name, agent.ENTRY, arguments, env)

    def _stop_worker(self, action: StopWorker) -> None:
        if action.name not in self._draining:
            job = job_of(action.name)
            with bound(job=job, worker=action.name, request=self._jobs.request_of(job)):
                log.info("stop %s: %s", action.name, action.reason)
            self._jobs.drain(job, action.name)
            limit = DRAIN_LEASES * self._settings.lease_seconds
            self._draining[action.name] = time.time() + limit

    def _provider_of(self, instance_id: str) -> Provider:
        """Raises :class:`FleetError`."""
        known = self._parts.listing.provider_of(instance_id)
        pool = self._parts.chronicle.pool_of(instance_id)
        provider = known or self._parts.estate.providers.get(pool or "")
        if provider is None:
            raise FleetError(f"nobody knows instance {instance_id}")
        return provider


def _offers(action: Launch, state: Observed) -> list[Offer]:
    """Those that the launch may be answered with."""
    pool = next(each for each in state.pools if each.name == action.pool)
    return [
        each
        for each in pool.offers or ()
        if action.zone in (None, each.zone)
        and (action.instance_types is None or each.instance_type in action.instance_types)
    ]


def _machine(instance: str, action: Launch, offers: list[Offer]) -> Instance:
    """As it will be listed, as far as is known; at the highest price that it may have."""
    spot = action.spot is not False
    return Instance(
        id=instance,
        pool=action.pool,
        state=InstanceState.BOOTING,
        launched_at=time.time(),
        notice_at=None,
        host="",
        price_per_hour=max((price_of(each, spot=spot) for each in offers), default=0.0),
        spot=spot,
        zone=action.zone or "",
        on_demand_price_per_hour=max(
            (each.on_demand_price_per_hour for each in offers), default=0.0
        ),
    )
