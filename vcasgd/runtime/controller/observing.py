"""What there is: machines, Ray's nodes and workers, heartbeats, jobs, pools."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from vcasgd.errors import ClusterError, JobUnreadable
from vcasgd.fleet.observed import (
    History,
    JobDemand,
    Limits,
    Observed,
    PoolView,
    WorkerView,
    remember,
)
from vcasgd.fleet.providers.base import Instance, InstanceState, Provider
from vcasgd.runtime.cluster import Cluster
from vcasgd.runtime.cluster import State as WorkerLife
from vcasgd.runtime.controller.names import instance_of, job_of
from vcasgd.runtime.crashes import Crashes
from vcasgd.settings import Settings
from vcasgd.store.connection import Client
from vcasgd.store.jobs import Job, Jobs, State
from vcasgd.store.servers import Control

log = logging.getLogger(__name__)

#: seconds that connecting to Ray may take
CONNECT_SECONDS = 30.0
#: a launched machine that is not listed after so long never existed
LAUNCH_UNSEEN_SECONDS = 60.0
#: states of machines that still count
STAYING = (InstanceState.BOOTING, InstanceState.RUNNING)


class Lookout:
    """One look after the other; remembers since when things are as they are."""

    def __init__(
        self, settings: Settings, ledger: Client, providers: dict[str, Provider], crashes: Crashes
    ) -> None:
        self._settings = settings
        self._providers = providers
        self._jobs = Jobs(ledger)
        self._control = Control(ledger)
        self._crashes = crashes
        self._cluster: Cluster | None = None
        self._history = History(since=time.time())
        self._unseen: dict[str, tuple[str, float]] = {}
        self._workers: tuple[WorkerView, ...] = ()

    @property
    def cluster(self) -> Cluster | None:
        """As it was reached at the last look."""
        return self._cluster

    @property
    def alive(self) -> set[str]:
        """Workers that were alive at the last look."""
        return {worker.name for worker in self._workers if worker.alive}

    def launched(self, instances: list[str], pool: str) -> None:
        """They count although they may not be listed yet."""
        self._unseen |= dict.fromkeys(instances, (pool, time.time()))

    def look(self, now: float) -> Observed:
        """Raises :class:`ClusterError` when the head was lost."""
        state = remember(self._observe(now), now)
        self._history = state.history
        return state

    def _observe(self, now: float) -> Observed:
        jobs = self._active()
        for job in jobs:
            self._refuse_unknown_pools(job)
        nodes = self._look_at_ray()
        noticed = self._noticed([job.id for job in jobs])
        instances = tuple(self._with_notice(one, noticed) for one in self._instances())
        return Observed(
            cluster=self._settings.cluster,
            instances=instances,
            nodes=nodes,
            workers=self._workers,
            jobs=tuple(self._demand(job) for job in jobs),
            pools=tuple(self._pool(name, instances, now) for name in self._providers),
            history=self._history,
            limits=Limits(idle_seconds=self._settings.idle_seconds),
            quarantined=frozenset(
                instance_of(worker) for job in jobs for worker in self._jobs.quarantined(job.id)
            ),
        )

    def _active(self) -> list[Job]:
        jobs = []
        for name in self._jobs.active():
            try:
                jobs.append(self._jobs.get(name))
            except JobUnreadable as error:
                log.warning("%s", error)
        return jobs

    def _noticed(self, jobs: list[str]) -> dict[str, float | None]:
        """Machines that will be taken away, as their workers say; a worker speaks for its own
        machine only, whatever it writes."""
        instance = {worker.name: worker.instance_id for worker in self._workers}
        return {
            instance[name]: _time(beat.get("notice_at"))
            for job in jobs
            for name, beat in self._jobs.workers(job).items()
            if beat.get("notice") == "terminate" and name in instance and job_of(name) == job
        }

    def _refuse_unknown_pools(self, job: Job) -> None:
        """A job that no pool could ever serve would wait for ever."""
        if job.state is State.STARTING and not self._providers.keys() & set(job.spec.workers.pools):
            wanted, known = ", ".join(job.spec.workers.pools), ", ".join(self._providers)
            why = f"workers.pools: there is no pool {wanted}; known: {known}"
            self._jobs.transition(job.id, State.FAILED, [State.STARTING], why=why)

    def _instances(self) -> list[Instance]:
        # several pools may share a provider
        providers = dict.fromkeys(self._providers.values())
        return [one for provider in providers for one in provider.instances()]

    def _with_notice(self, one: Instance, noticed: dict[str, float | None]) -> Instance:
        """Where the cloud tells only the machine, the machine's worker tells us."""
        if one.id not in noticed or one.state is InstanceState.LEAVING:
            return one
        return replace(one, state=InstanceState.LEAVING, notice_at=noticed[one.id])

    def _look_at_ray(self) -> frozenset[str] | None:
        if self._cluster is None:
            self._cluster = Cluster.connect(
                self._settings.required("ray_address"),
                self._settings.cluster,
                CONNECT_SECONDS,
                self._ray_token,
            )
        if not self._cluster.healthy():
            raise ClusterError("Ray's head was lost")
        nodes = {node.instance_id for node in self._cluster.nodes() if node.alive}
        before = self.alive
        workers = self._cluster.workers()
        self._workers = tuple(
            WorkerView(
                name, job_of(name), worker.instance_id or "", worker.state is not WorkerLife.DEAD
            )
            for name, worker in workers.items()
        )
        for worker in self._workers:
            if worker.name in before and not worker.alive and worker.instance_id in nodes:
                self._crashes.died(worker.name, worker.job, workers[worker.name].reason)
        return frozenset(node for node in nodes if node is not None)

    def _demand(self, job: Job) -> JobDemand:
        workers = job.spec.workers
        work = self._jobs.work(job.id)
        left = work["total"] - work["finished"] * work["per_epoch"]
        return JobDemand(
            job=job.id,
            minimum=workers.min,
            maximum=workers.max,
            pools=workers.pools,
            # after the last epoch there is its evaluation still to do
            wants=max(1, left),
            running=job.state in (State.STARTING, State.RUNNING),
        )

    def _pool(self, name: str, instances: tuple[Instance, ...], now: float) -> PoolView:
        listed = {one.id for one in instances}
        self._unseen = {
            each: (pool, at)
            for each, (pool, at) in self._unseen.items()
            if each not in listed and now - at < LAUNCH_UNSEEN_SECONDS
        }
        stored = self._control.pool(name)
        capacity = self._providers[name].capacity(name)
        reason = stored.reason if stored.blocked_until > now else None
        in_use = sum(one.pool == name and one.state in STAYING for one in instances)
        if reason is None and capacity is not None and in_use >= capacity:
            reason = f"{in_use} of {capacity} machines in use"
        return PoolView(
            name=name,
            launches=stored.launches,
            launching=sum(pool == name for pool, _ in self._unseen.values()),
            capacity=capacity,
            blocked_until=stored.blocked_until,
            reason=reason,
        )

    @property
    def _ray_token(self) -> str | None:
        token = self._settings.ray_token
        return token.get_secret_value() if token else None


def _time(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
