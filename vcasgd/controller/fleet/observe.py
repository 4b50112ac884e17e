"""What there is: machines, Ray's nodes and workers, heartbeats, jobs, pools."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from vcasgd.cluster import ActorState as WorkerLife
from vcasgd.cluster import Cluster
from vcasgd.controller.fleet.context import ControllerContext
from vcasgd.controller.fleet.demands import Demands
from vcasgd.controller.fleet.names import instance_of, job_of, learner_of
from vcasgd.errors import ClusterError, JobUnreadable
from vcasgd.fleet.observed import (
    LaunchCounts,
    Observed,
    PoolView,
    WorkerView,
    remember,
)
from vcasgd.fleet.providers.base import Instance, InstanceState, Offer
from vcasgd.store.ledger.heartbeats import Heartbeat
from vcasgd.store.ledger.job import JobRecord, JobState

log = logging.getLogger(__name__)

#: seconds that connecting to Ray may take, also where the machine is busy
CONNECT_SECONDS = 120.0
#: a launched machine that is not listed after so long never existed
LAUNCH_UNSEEN_SECONDS = 60.0
#: states of machines that still count
STAYING = (InstanceState.BOOTING, InstanceState.RUNNING)


class Observer:
    """One look after the other; remembers since when things are as they are."""

    def __init__(self, parts: ControllerContext) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._jobs = parts.jobs
        self._demands = Demands(parts)
        self._cluster: Cluster | None = None
        self._history = LaunchCounts(since=time.time())
        self._unseen: dict[str, tuple[Instance, float]] = {}
        self._workers: tuple[WorkerView, ...] = ()
        #: beside the first worker of each machine, and whether each is alive
        self.further: dict[str, bool] = {}

    @property
    def cluster(self) -> Cluster | None:
        """As it was reached at the last look."""
        return self._cluster

    @property
    def alive(self) -> set[str]:
        """Workers that were alive at the last look."""
        further = {name for name, alive in self.further.items() if alive}
        return further | {worker.name for worker in self._workers if worker.alive}

    def launched(self, machines: Iterable[Instance]) -> None:
        """They count although they may not be listed yet."""
        now = time.time()
        self._unseen |= {one.id: (one, now) for one in machines}
        self._parts.listing.forget()

    def look(self, now: float) -> Observed:
        """Raises :class:`ClusterError` when the head was lost, and
        :class:`~vcasgd.errors.FleetError` where a cloud could never be asked."""
        state = remember(self._observe(now), now)
        self._history = state.history
        return state

    def _observe(self, now: float) -> Observed:
        jobs = self._active()
        for job in jobs:
            self._refuse_hopeless(job)
        nodes = self._look_at_ray()
        beats = {job.id: self._jobs.workers(job.id) for job in jobs}
        machines = self._machines(beats, now)
        self._measure(jobs, beats, machines, nodes, now)
        self._parts.memory.load()
        self._parts.memory.joined(one for one in machines if one.id in (nodes or ()))
        views = tuple(self._pool(name, machines, now) for name in self._parts.estate.pools)
        offers: dict[str, Sequence[Offer]] = {view.name: view.offers or () for view in views}
        paid = (*machines, *(one for one, _ in self._unseen.values()))
        demands = tuple(self._demands.of(job, paid, offers, now) for job in jobs)
        return Observed(
            cluster=self._settings.cluster,
            instances=machines,
            nodes=nodes,
            workers=self._workers,
            jobs=demands,
            pools=views,
            history=self._history,
            limits=self._parts.limits,
            quarantined=frozenset(
                instance_of(worker) for job in jobs for worker in self._jobs.quarantined(job.id)
            ),
            boot_errors=self._boot_errors(machines, nodes, now),
            payers=self._parts.books.payers,
            unpaid=self._demands.unpaid(jobs),
        )

    def _active(self) -> list[JobRecord]:
        jobs = []
        for name in self._jobs.active():
            try:
                jobs.append(self._jobs.get(name))
            except JobUnreadable as error:
                log.warning("%s", error)
        return jobs

    def _refuse_hopeless(self, job: JobRecord) -> None:
        """A job that no pool could ever serve would wait for ever."""
        if job.state is not JobState.STARTING or self._parts.guard.divide(job)[0]:
            return
        wanted, known = job.spec.workers.pools, self._parts.estate.pools
        why = f"workers.pools: there is no pool {', '.join(wanted)}; known: {', '.join(known)}"
        if known.keys() & set(wanted):
            labels = ", ".join(job.spec.required_labels)
            why = f"workers.pools: none of {', '.join(wanted)} may see data labelled {labels}"
        self._jobs.transition(job.id, JobState.FAILED, [JobState.STARTING], why=why)

    # -- machines ------------------------------------------------------------------------------

    def _machines(
        self, beats: Mapping[str, Mapping[str, Heartbeat]], now: float
    ) -> tuple[Instance, ...]:
        """Where the cloud tells only the machine, the machine's worker tells us; a worker speaks
        for its own machine only, whatever it writes."""
        instance = {worker.name: worker.instance_id for worker in self._workers}
        said = {
            instance[name]: beat
            for job, workers in beats.items()
            for name, beat in workers.items()
            if name in instance and job_of(name) == job
        }
        listed = self._parts.listing.instances(now)
        names = {one.id for one in listed}
        self._unseen = {
            each: (one, at)
            for each, (one, at) in self._unseen.items()
            if each not in names and now - at < LAUNCH_UNSEEN_SECONDS
        }
        return tuple(_with_notice(one, said.get(one.id), now) for one in listed)

    def _boot_errors(
        self, machines: Iterable[Instance], nodes: frozenset[str] | None, now: float
    ) -> dict[str, str]:
        """Of machines that never joined."""
        joined = {*self._history.joined, *(nodes or ())}
        said = {
            one.id: self._parts.listing.boot_error(one, now)
            for one in machines
            if one.state in STAYING and one.id not in joined
        }
        return {machine: text for machine, text in said.items() if text is not None}

    def _measure(
        self,
        jobs: Iterable[JobRecord],
        beats: Mapping[str, Mapping[str, Heartbeat]],
        machines: Sequence[Instance],
        nodes: frozenset[str] | None,
        now: float,
    ) -> None:
        """What machines cost, and how fast they are."""
        self._parts.books.look(
            machines,
            nodes=nodes,
            joined=self._history.joined,
            works_for={w.instance_id: w.job for w in self._workers if w.alive},
            coming=self._unseen,
            billing_seconds=self._parts.limits.billing_seconds,
            now=now,
        )
        for job in jobs:
            self._parts.speeds.look(job, beats[job.id], machines, now)

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
        views = [
            WorkerView(
                name, job_of(name), worker.instance_id or "", worker.state is not WorkerLife.DEAD
            )
            for name, worker in workers.items()
        ]
        self._workers = tuple(view for view in views if learner_of(view.name) == 1)
        self.further = {view.name: view.alive for view in views if learner_of(view.name) > 1}
        for worker in self._workers:
            if worker.name in before and not worker.alive and worker.instance_id in nodes:
                self._parts.crashes.died(worker.name, worker.job, workers[worker.name].reason)
        return frozenset(node for node in nodes if node is not None)

    # -- pools ---------------------------------------------------------------------------------

    def _pool(self, name: str, machines: Sequence[Instance], now: float) -> PoolView:
        spec, stored = self._parts.estate.pools[name], self._parts.memory.pool(name)
        offers, problem = self._parts.listing.offers(name, now)
        capacity = self._capacity(name)
        in_use = sum(one.pool == name and one.state in STAYING for one in machines)
        coming = [one for one, _ in self._unseen.values() if one.pool == name]
        reasons = self._parts.memory.reasons(name, now)
        if problem is not None:
            reasons.append(f"no prices: {problem}")
        if capacity is not None and in_use >= capacity and not reasons:
            reasons.append(f"{in_use} of {capacity} machines in use")
        return PoolView(
            name=name,
            launches=stored.launches,
            launching=len(coming),
            capacity=capacity,
            blocked_until=stored.blocked_until,
            reason="; ".join(reasons) or None,
            refused_since=stored.refused_since,
            spot=spec.spot,
            offers=offers,
            markets=self._parts.memory.markets(name, now),
            quotas=self._parts.memory.quotas(name, now),
            boot_seconds=spec.boot_seconds,
            max_price=spec.max_price_per_hour,
            launching_on_demand=sum(not one.spot for one in coming),
        )

    def _capacity(self, pool: str) -> int | None:
        of_provider = self._parts.estate.providers[pool].capacity(pool)
        limits = (self._parts.estate.pools[pool].max_instances, of_provider)
        return min((each for each in limits if each is not None), default=None)

    @property
    def _ray_token(self) -> str | None:
        token = self._settings.ray_token
        return token.get_secret_value() if token else None


def _with_notice(one: Instance, beat: Heartbeat | None, now: float) -> Instance:
    if beat is None:
        return one
    if beat.notice == "terminate" and one.state is not InstanceState.LEAVING:
        return replace(one, state=InstanceState.LEAVING, notice_at=beat.notice_at)
    if beat.notice == "rebalance" and one.advised_at is None:
        return replace(one, advised_at=beat.notice_at or now)
    return one
