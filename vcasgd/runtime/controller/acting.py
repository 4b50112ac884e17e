"""Carries out what was decided; every action may be carried out twice."""

from __future__ import annotations

import logging
import time

from vcasgd.errors import ClusterError, FleetError, NoCapacity
from vcasgd.fleet.plan import Action, Launch, StartWorker, StopWorker, Terminate, backoff
from vcasgd.fleet.providers.base import Boot, Provider
from vcasgd.runtime import agent
from vcasgd.runtime.admission import worker_environment
from vcasgd.runtime.chronicle import Chronicle
from vcasgd.runtime.controller.boots import node_boot
from vcasgd.runtime.controller.names import job_of, worker_name
from vcasgd.runtime.controller.observing import Lookout
from vcasgd.runtime.controller.providers import LOCAL_POOL
from vcasgd.runtime.crashes import Crashes
from vcasgd.settings import Settings
from vcasgd.store.connection import Client
from vcasgd.store.jobs import Jobs
from vcasgd.store.servers import Control, Pool

log = logging.getLogger(__name__)

#: a refused pool is asked again after the first number of seconds, later up to the second
POOL_BACKOFF_SECONDS = (1.0, 300.0)
#: a worker that was asked to leave is killed after so many lease times
DRAIN_LEASES = 2.0


class Hands:
    """Launches, starts, stops and terminates."""

    def __init__(
        self,
        settings: Settings,
        ledger: Client,
        providers: dict[str, Provider],
        lookout: Lookout,
        chronicle: Chronicle,
        crashes: Crashes,
    ) -> None:
        self._settings = settings
        self._providers = providers
        self._jobs = Jobs(ledger)
        self._control = Control(ledger)
        self._lookout = lookout
        self._chronicle = chronicle
        self._crashes = crashes
        self._draining: dict[str, float] = {}

    def act(self, action: Action) -> None:
        try:
            match action:
                case Launch():
                    self._launch(action)
                case StartWorker():
                    self._start_worker(action)
                case StopWorker():
                    self._stop_worker(action)
                case Terminate():
                    log.info("terminate %s: %s", action.instance_id, action.reason)
                    self._chronicle.ended_by_us(action.instance_id, action.reason)
                    self._provider_of(action.instance_id).terminate(action.instance_id)
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
        for request in self._control.take_requests():
            if request["kind"] != "evict":
                log.warning("unknown request %s", request["kind"])
                continue
            instance = request["instance"]
            provider = self._provider_of(instance)
            log.info("asked to %s %s", "kill" if request.get("kill") else "evict", instance)
            try:
                if request.get("kill"):
                    provider.kill(instance)
                else:
                    provider.evict(instance, request.get("notice_seconds"))
            except FleetError as error:
                log.warning("evict %s: %s", instance, error)

    def _launch(self, action: Launch) -> None:
        stored = self._control.pool(action.pool)
        try:
            granted = self._providers[action.pool].launch(
                action.pool, action.count, self._boot(action.pool), action.token
            )
        except (NoCapacity, FleetError) as error:
            failures = stored.failures + 1
            wait = backoff(failures, *POOL_BACKOFF_SECONDS)
            log.info("%s refuses: %s; next attempt in %.0f s", action.pool, error, wait)
            self._control.set_pool(
                action.pool,
                Pool(stored.launches + 1, failures, time.time() + wait, str(error)),
            )
            return
        log.info("launched in %s: %s", action.pool, ", ".join(granted))
        self._lookout.launched(granted, action.pool)
        self._control.set_pool(action.pool, Pool(stored.launches + 1))

    def _boot(self, pool: str) -> Boot:
        local = self._providers[pool].name == "local"
        return node_boot(self._settings, local=local, pool=pool)

    def _start_worker(self, action: StartWorker) -> None:
        cluster = self._lookout.cluster
        assert cluster is not None
        name = worker_name(action.instance_id, action.job)
        if not self._crashes.may_start(name):
            return
        log.info("start %s", name)
        arguments = {"job": action.job, "worker": name, "instance": action.instance_id}
        self._jobs.forget_worker(action.job, name)
        env = worker_environment(self._settings, action.job, name)
        cluster.start_worker(action.instance_id, name, agent.ENTRY, arguments, env)

    def _stop_worker(self, action: StopWorker) -> None:
        if action.name not in self._draining:
            log.info("stop %s: %s", action.name, action.reason)
            self._jobs.drain(job_of(action.name), action.name)
            limit = DRAIN_LEASES * self._settings.lease_seconds
            self._draining[action.name] = time.time() + limit

    def _provider_of(self, instance_id: str) -> Provider:
        return self._providers[self._chronicle.pool_of(instance_id) or LOCAL_POOL]
