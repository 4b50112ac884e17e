"""The controller: observe, decide, act, for ever. Run as ``python -m vcasgd.runtime.controller``.

It holds a lease in the ledger, so a second one stands by. Killed at any line and started
again it finds its machines by their tag, its workers through Ray, its jobs in the ledger.
When Ray's head dies this process ends and is started again, which is the way on that
:class:`~vcasgd.runtime.cluster.Cluster` describes; jobs go on meanwhile.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from typing import NoReturn

from vcasgd.errors import (
    ClusterError,
    FleetError,
    JobUnreadable,
    NoCapacity,
    StoreUnavailable,
    VcasgdError,
)
from vcasgd.fleet.observed import (
    History,
    JobDemand,
    Limits,
    Observed,
    PoolView,
    WorkerView,
    remember,
)
from vcasgd.fleet.plan import Action, Launch, StartWorker, StopWorker, Terminate, backoff, decide
from vcasgd.fleet.providers.base import INSTANCE_ID, Boot, Instance, InstanceState, Provider
from vcasgd.fleet.providers.local import LocalPool, LocalProvider
from vcasgd.runtime import agent
from vcasgd.runtime.admission import worker_environment
from vcasgd.runtime.chronicle import Chronicle, Row
from vcasgd.runtime.cluster import Cluster, node_command
from vcasgd.runtime.cluster import State as WorkerLife
from vcasgd.runtime.crashes import Crashes
from vcasgd.runtime.job_loop import JobLoop
from vcasgd.runtime.leadership import Leadership
from vcasgd.runtime.processes import configure_logging, exit_status
from vcasgd.settings import Settings, load_settings
from vcasgd.store.connection import Client, connect, patiently
from vcasgd.store.jobs import Job, Jobs, State
from vcasgd.store.servers import Control, Pool

log = logging.getLogger(__name__)

#: the one pool that this machine plays
LOCAL_POOL = "local"
#: seconds that a Ray call may take, and that connecting may take
RAY_SECONDS = 10.0
CONNECT_SECONDS = 30.0
#: a refused pool is asked again after the first number of seconds, later up to the second
POOL_BACKOFF_SECONDS = (1.0, 300.0)
#: a launched machine that is not listed after so long never existed
LAUNCH_UNSEEN_SECONDS = 60.0
#: a worker that was asked to leave is killed after so many lease times
DRAIN_LEASES = 2.0


#: states of machines that still count
STAYING = (InstanceState.BOOTING, InstanceState.RUNNING)


class FleetLoop:
    """Keeps the machines: observe → :func:`vcasgd.fleet.plan.decide` → act.

    Every action may be carried out twice, and every round may be cut off at any line.
    """

    def __init__(self, settings: Settings, ledger: Client, providers: dict[str, Provider]) -> None:
        self._settings = settings
        self._providers = providers
        self._jobs = Jobs(ledger)
        self._control = Control(ledger)
        self._cluster: Cluster | None = None
        self._history = History(since=time.time())
        self._unseen: dict[str, tuple[str, float]] = {}
        self._workers: tuple[WorkerView, ...] = ()
        self._crashes = Crashes(self._jobs)
        self._draining: dict[str, float] = {}
        self._chronicle = Chronicle(self._control, self._jobs)

    def round(self) -> None:
        """One observe–decide–act. Raises :class:`ClusterError` when the head was lost."""
        self._serve_requests()
        now = time.time()
        state = remember(self._observe(now), now)
        self._history = state.history
        self._show(state)
        for action in decide(state, now):
            self._act(action)
        self._kill_lingering()

    # -- observe ----------------------------------------------------------------------------------

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
                _instance_of(worker) for job in jobs for worker in self._jobs.quarantined(job.id)
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
        instance_of = {worker.name: worker.instance_id for worker in self._workers}
        return {
            instance_of[name]: _time(beat.get("notice_at"))
            for job in jobs
            for name, beat in self._jobs.workers(job).items()
            if beat.get("notice") == "terminate" and name in instance_of and _job_of(name) == job
        }

    def _refuse_unknown_pools(self, job: Job) -> None:
        """A job that no pool could ever serve would wait for ever."""
        if job.state is State.STARTING and not self._providers.keys() & set(job.spec.workers.pools):
            wanted, known = ", ".join(job.spec.workers.pools), ", ".join(self._providers)
            why = f"workers.pools: there is no pool {wanted}; known: {known}"
            self._jobs.transition(job.id, State.FAILED, [State.STARTING], why=why)

    def _instances(self) -> list[Instance]:
        return [one for provider in self._providers.values() for one in provider.instances()]

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
        before = {worker.name for worker in self._workers if worker.alive}
        workers = self._cluster.workers()
        self._workers = tuple(
            WorkerView(
                name, _job_of(name), worker.instance_id or "", worker.state is not WorkerLife.DEAD
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

    # -- act ----------------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
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

    def _launch(self, action: Launch) -> None:
        stored = self._control.pool(action.pool)
        try:
            granted = self._providers[action.pool].launch(
                action.pool, action.count, self._boot(), action.token
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
        now = time.time()
        self._unseen |= dict.fromkeys(granted, (action.pool, now))
        self._control.set_pool(action.pool, Pool(stored.launches + 1))

    def _boot(self) -> Boot:
        """What a machine runs: a node of the cluster, with what any worker on it has to know.

        Nothing that opens a server: that is told to each worker when it is started.
        """
        settings = self._settings
        temp_dir = settings.ray_dir / INSTANCE_ID if settings.ray_dir else None
        command = node_command(
            address=settings.required("ray_address"),
            instance_id=INSTANCE_ID,
            cpus=1,
            temp_dir=temp_dir,
            heartbeat=settings.heartbeat,
            labels={},
            token=self._ray_token,
        )
        env = {
            "VCASGD_STORAGE_URL": settings.required("storage_url"),
            "VCASGD_HEARTBEAT": str(settings.heartbeat),
            "VCASGD_CACHE_DIR": str(settings.home_path / "cache"),
        }
        return Boot(command.argv, {**command.env, **env})

    def _start_worker(self, action: StartWorker) -> None:
        assert self._cluster is not None
        name = worker_name(action.instance_id, action.job)
        if not self._crashes.may_start(name):
            return
        log.info("start %s", name)
        arguments = {"job": action.job, "worker": name, "instance": action.instance_id}
        self._jobs.forget_worker(action.job, name)
        env = worker_environment(self._settings, action.job, name)
        self._cluster.start_worker(action.instance_id, name, agent.ENTRY, arguments, env)

    def _stop_worker(self, action: StopWorker) -> None:
        if action.name not in self._draining:
            log.info("stop %s: %s", action.name, action.reason)
            self._jobs.drain(_job_of(action.name), action.name)
            limit = DRAIN_LEASES * self._settings.lease_seconds
            self._draining[action.name] = time.time() + limit

    def _kill_lingering(self) -> None:
        alive = {worker.name for worker in self._workers if worker.alive}
        self._draining = {name: at for name, at in self._draining.items() if name in alive}
        for name, deadline in self._draining.items():
            if time.time() > deadline and self._cluster is not None:
                log.warning("%s did not leave in time", name)
                self._cluster.stop_worker(name)

    def _provider_of(self, instance_id: str) -> Provider:
        return self._providers[self._chronicle.pool_of(instance_id) or LOCAL_POOL]

    # -- what people ask and see -----------------------------------------------

    def _serve_requests(self) -> None:
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

    def _show(self, state: Observed) -> None:
        job_of = {worker.instance_id: worker.job for worker in state.workers if worker.alive}
        pools = {
            pool.name: {
                "blocked_until": pool.blocked_until,
                "reason": pool.reason,
                "launches": pool.launches,
                "instances": sum(one.pool == pool.name for one in state.instances),
            }
            for pool in state.pools
        }
        rows = {
            one.id: Row(
                pool=one.pool,
                state=one.state.value,
                joined=one.id in (state.nodes or ()),
                job=job_of.get(one.id),
                launched_at=one.launched_at,
                notice_at=one.notice_at,
                host=one.host,
                spot=one.spot,
                price_per_hour=one.price_per_hour,
            )
            for one in state.instances
        }
        for gone, job in self._chronicle.show(rows, pools).items():
            if job is not None:
                self._jobs.forget_worker(job, worker_name(gone, job))
            if self._settings.ray_dir is not None:
                shutil.rmtree(self._settings.ray_dir / gone, ignore_errors=True)


def worker_name(instance_id: str, job: str) -> str:
    """One worker of a job on one machine; unique while the machine lives."""
    return f"{job}.{instance_id}"


def _job_of(worker: str) -> str:
    return worker.partition(".")[0]


def _time(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _instance_of(worker: str) -> str:
    return worker.partition(".")[2]


class Controller:
    """Both loops, under the controller's lease."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ledger = connect(settings.secret("ledger_url"))
        self._nodes = [connect(url, waits=False) for url in settings.tensors_urls()]
        self._leadership = Leadership(Control(self._ledger), settings)
        self._stop = threading.Event()

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> None:
        """Until :meth:`stop`. Raises :class:`ClusterError` when Ray's head was lost."""
        self._leadership.start()
        while not self._stop.is_set() and not self._leadership.sure:
            self._stop.wait(self._settings.heartbeat / 4)
        jobs = JobLoop(self._settings, self._ledger, self._nodes, self._leadership)
        jobs.start()
        try:
            self._keep_fleet()
        finally:
            jobs.stop(checkpoint=self._stop.is_set())
            self._leadership.stop()

    def _keep_fleet(self) -> None:
        settings = self._settings
        pool = LocalPool(
            LOCAL_POOL,
            settings.local_capacity,
            price_per_hour=settings.local_price_per_hour,
            on_demand_price_per_hour=settings.local_on_demand_price_per_hour,
            boot_seconds=settings.local_boot_seconds,
            notice_seconds=settings.local_notice_seconds,
        )
        providers: dict[str, Provider] = {
            LOCAL_POOL: LocalProvider(settings.home_path, settings.cluster, pool)
        }
        fleet = patiently(
            lambda: FleetLoop(settings, self._ledger, providers), settings.patience_seconds
        )
        while not self._stop.is_set():
            if self._leadership.sure:
                try:
                    fleet.round()
                except StoreUnavailable as error:
                    log.warning("ledger: %s", error)
            self._stop.wait(settings.heartbeat / 2)


def main() -> NoReturn:
    """The process. Exit status 0 after SIGTERM, 1 after an error; it is meant to be restarted."""
    configure_logging("controller")
    status = 0
    try:
        controller = Controller(load_settings())
        signal.signal(signal.SIGTERM, lambda _number, _frame: controller.stop())
        signal.signal(signal.SIGINT, lambda _number, _frame: controller.stop())
        controller.run()
    except VcasgdError as error:
        status = exit_status(error)
    logging.shutdown()
    # Ray's own farewell would wait for a head that is dead
    os._exit(status)


if __name__ == "__main__":
    main()
