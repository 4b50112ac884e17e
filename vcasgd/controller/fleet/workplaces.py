"""The machines that run workers, and the workers on them: observation and orders.

An order is in the ledger. A machine that joined fetches it with its next report, and a node of Ray
gets it through Ray. Both report the same about their workers.
"""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from pydantic import ValidationError

from vcasgd.backoff import backoff
from vcasgd.cluster.driver import Cluster
from vcasgd.errors import Cause, CloudUnavailable, ClusterError, StoreError
from vcasgd.fleet.notices import Notice, NoticeKind
from vcasgd.fleet.observed import WorkerView
from vcasgd.fleet.providers.joining import JoinedFleet
from vcasgd.logging import bound, isolated
from vcasgd.schemas.fleet import Machine, MachineState, WorkerOrder
from vcasgd.schemas.joining import WorkerReport
from vcasgd.settings import Settings
from vcasgd.steady_time import steady_time
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.job import PROCESS, Failure
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import LostWorkers
from vcasgd.store.ledger.machines import (
    PREFIX,
    JoinedMachine,
    JoinedMachines,
    MachineEnd,
    MachineReport,
    WorkerOrders,
    to_json,
)
from vcasgd.worker_names import job_of, learner_of, machine_of

log = logging.getLogger(__name__)

#: Seconds in which the controller must connect to Ray, also on a busy machine.
CONNECT_SECONDS = 120.0
#: Heartbeats in which Ray reports a dead machine: three missed checks, of three heartbeats each.
LOST_HEARTBEATS = 10
#: Seconds before the first restart of a worker that crashed, and at most before later ones.
RESTART_SECONDS = (1.0, 60.0)
#: Seconds after such a pause in which another crash makes the next one longer.
FORGET_SECONDS = 3600.0
#: Why workers have ended whose node lost the process that ran them.
RUNNER_ENDED = "the process that runs the workers of its machine ended"


class RestartBackoff:
    """Counts crashes by worker, in memory: a new controller starts from zero.

    A process also ends when its machine does, of which Ray learns later. So the end of a process is
    a crash only if its machine is still in the cluster ``confirm_seconds`` later.
    """

    def __init__(
        self, jobs: Jobs, confirm_seconds: float, clock: Callable[[], float] = steady_time
    ) -> None:
        self._jobs = jobs
        self._confirm_seconds = confirm_seconds
        #: Worker, when its process ended, its job, and what Ray says about it, in this order.
        self._unconfirmed: list[tuple[str, float, str, str]] = []
        self._clock = clock
        #: Crashes of each worker, and when it may start again.
        self._crashes: dict[str, tuple[int, float]] = {}

    def record_end(self, worker: str, job: str, reason: str) -> None:
        """Record that a worker's process ended.

        It is no crash if the worker was asked to leave, or if its last heartbeat says why it
        leaves, or that its machine is about to be taken.
        """
        beat = self._jobs.workers.heartbeat(job, worker)
        leaves = beat is not None and (beat.leaving or beat.notice == "terminate")
        if leaves or worker in self._jobs.workers.draining(job):
            self._crashes.pop(worker, None)
            return
        now = self._clock()
        self._crashes = {
            name: each for name, each in self._crashes.items() if now - each[1] < FORGET_SECONDS
        }
        count = self._crashes.get(worker, (0, 0.0))[0] + 1
        pause = backoff(count, *RESTART_SECONDS)
        self._crashes[worker] = count, now + pause
        with bound(job=job, worker=worker, request=self._jobs.request_of(job)):
            log.warning("%s: its process ended: %s; restart in %.0f s", worker, reason, pause)
        self._unconfirmed.append((worker, self._clock(), job, reason))

    def confirm(self, machines: Collection[str]) -> None:
        """Report the crashes of workers whose machine is still among ``machines``, if it is time.

        Raises :class:`~vcasgd.errors.StoreUnavailable`.
        """
        for end in list(self._unconfirmed):
            worker, ended_at, job, reason = end
            lost = machine_of(worker) not in machines
            if not lost and self._clock() - ended_at < self._confirm_seconds:
                continue
            if not lost:
                with isolated(job):
                    self._report(worker, job, reason)
            self._unconfirmed.remove(end)

    def _report(self, worker: str, job: str, reason: str) -> None:
        message = f"the process of worker {worker} ended: {reason or 'unknown reason'}"
        self._jobs.report_failure(job, Failure(worker, PROCESS, message, "", Cause.WORK))
        self._jobs.event(job, "worker-crashed", message, worker=worker)

    def may_start(self, worker: str) -> bool:
        """Return True if the worker's back-off has passed."""
        return self._clock() >= self._crashes.get(worker, (0, 0.0))[1]


class Workplaces:
    """Machines and workers as of the last :meth:`refresh`.

    ``connect`` returns the connection to Ray, or None while no pool has machines in Ray.
    """

    def __init__(
        self,
        connect: Callable[[], Cluster | None],
        settings: Settings,
        ledger: RedisClient,
        clock: Callable[[], float] = steady_time,
    ) -> None:
        self._connect = connect
        self._joined = JoinedMachines(ledger, settings.lease_seconds)
        self._ledger = WorkerOrders(ledger)
        self._lost = LostWorkers(ledger)
        confirm_seconds = LOST_HEARTBEATS * settings.heartbeat
        self._restarts = RestartBackoff(Jobs(ledger), confirm_seconds, clock)
        self._cluster: Cluster | None = None
        #: Ray's nodes that are alive, and the last report of each machine.
        self._ray: frozenset[str] = frozenset()
        self._reports: dict[str, MachineReport] = {}
        self._orders: dict[str, list[WorkerOrder]] = {}
        #: Why workers have ended; None while they run, or are about to.
        self._ends: dict[str, str | None] = {}
        #: Machines that are present.
        self.nodes: frozenset[str] = frozenset()
        #: The first worker of each machine, which the plan places.
        self.workers: tuple[WorkerView, ...] = ()
        #: The other workers of each machine, and whether each is alive.
        self.further: dict[str, bool] = {}
        #: Eviction notices that machines received, by machine.
        self.notices: dict[str, Notice] = {}

    @property
    def placed(self) -> set[str]:
        """Names of all workers that the controller has placed on the present machines."""
        return set(self._ends)

    @property
    def alive(self) -> set[str]:
        """Names of all workers that are alive."""
        return {name for name, why in self._ends.items() if why is None}

    # -- observation -------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read what machines report, free the leases of workers that ended, and record the crashes
        of those whose machine is present.

        Raises :class:`~vcasgd.errors.ClusterError` if Ray's head was lost.
        """
        alive, known, present = self.alive, self._ends, self._present()
        self._orders = self._ledger.all()
        absent = self._orders.keys() - present
        gone = {order.worker for machine in absent for order in self._orders.pop(machine)}
        self._exchange()
        self._ends = {
            order.worker: _end(order, self._reports.get(machine))
            for machine, orders in self._orders.items()
            for order in orders
        }
        ended = {name for name, why in self._ends.items() if why is not None}
        # An earlier controller may not have seen the end of those that have ended already.
        new = {name for name in ended if known.get(name) is None}
        if lost := gone | new | (alive - self._ends.keys()):
            self._report_lost(lost)
            # A machine that died between the two lists must be missing.
            present = self._present()
        self._ledger.forget(*absent)
        self.nodes = present
        self._set_views()
        for name in sorted(alive & ended):
            if learner_of(name) == 1 and machine_of(name) in present:
                with isolated(job_of(name)):
                    self._restarts.record_end(name, job_of(name), self._ends[name] or "")
        self._restarts.confirm(self.nodes)

    def lost_nodes(self) -> bool:
        """Return True if a machine is no longer present that was at the last refresh.

        Raises :class:`~vcasgd.errors.ClusterError` if Ray's head was lost.
        """
        return not self.nodes <= self._present()

    def _present(self) -> frozenset[str]:
        if self._cluster is None:
            self._cluster = self._connect()
        self._ray = self._cluster.nodes() if self._cluster else frozenset()
        joined = {machine.name: report for machine, report, _ in self._joined.present()}
        of_ray = {name: each for name, each in self._reports.items() if name in self._ray}
        self._reports = {**of_ray, **joined}
        return self._ray | joined.keys()

    def _exchange(self) -> None:
        """Exchange orders and reports with Ray's nodes."""
        if self._cluster is None:
            return
        orders = {name: to_json(self._orders.get(name, ())) for name in self._ray}
        try:
            reports = self._cluster.exchange(orders)
        except ClusterError as error:
            # Their last reports hold.
            log.warning("%s", error)
            return
        for machine, text in reports.items():
            if text is None:
                self._on_lost_runner(machine)
                continue
            try:
                self._reports[machine] = MachineReport.model_validate_json(text)
            except ValidationError:
                log.warning("the report of %s can't be read", machine)

    def _on_lost_runner(self, machine: str) -> None:
        """End all workers of a machine, and none of them starts again without a new order."""
        ended = {
            order.worker: WorkerReport(start=order.start, ended=RUNNER_ENDED)
            for order in self._orders.get(machine, ())
        }
        self._reports[machine] = MachineReport(at=0.0, workers=ended)
        self._ledger.forget(machine)

    def _set_views(self) -> None:
        """Set what others see of workers and notices."""
        self.workers = tuple(
            WorkerView(name, job_of(name), machine_of(name), why is None)
            for name, why in self._ends.items()
            if learner_of(name) == 1
        )
        self.further = {n: why is None for n, why in self._ends.items() if learner_of(n) > 1}
        self.notices = {
            machine: Notice(NoticeKind(report.notice.kind), report.notice.at)
            for machine, report in self._reports.items()
            if report.notice is not None
        }

    def _report_lost(self, workers: Iterable[str]) -> None:
        """Free the leases of workers whose process or machine has ended."""
        by_job: defaultdict[str, list[str]] = defaultdict(list)
        for name in workers:
            by_job[job_of(name)].append(name)
        self._lost.report(by_job)

    # -- orders ------------------------------------------------------------------------------------

    def may_start(self, worker: str) -> bool:
        """Return True unless the worker crashed and has to wait."""
        return self._restarts.may_start(worker)

    def start(self, environments: Mapping[str, Mapping[str, str]]) -> None:
        """Start workers, unless they run already, on machines that are present.

        ``environments``: the variables of each worker.
        """
        alive, changed = self.alive, dict[str, list[WorkerOrder]]()
        for worker, env in environments.items():
            machine = machine_of(worker)
            if machine not in self.nodes or worker in alive:
                continue
            if machine not in changed:
                orders = self._orders.get(machine, ())
                changed[machine] = [order for order in orders if order.worker in alive]
            start = secrets.token_hex(8)
            changed[machine].append(
                WorkerOrder(worker=worker, job=job_of(worker), start=start, env=dict(env))
            )
        self._order(changed)

    def stop(self, worker: str) -> None:
        """Kill a worker, if it exists."""
        machine = machine_of(worker)
        orders = self._orders.get(machine, [])
        left = [order for order in orders if order.worker != worker]
        if len(left) < len(orders):
            self._order({machine: left})

    def _order(self, orders: Mapping[str, list[WorkerOrder]]) -> None:
        """Store orders, and send them to Ray's nodes."""
        self._ledger.set(orders)
        self._orders.update(orders)
        new = (order.worker for rows in orders.values() for order in rows)
        self._ends.update(dict.fromkeys(new))
        for machine, rows in orders.items():
            if self._cluster is not None and machine in self._ray:
                try:
                    self._cluster.send(machine, to_json(rows))
                except ClusterError as error:
                    # The next round sends them again.
                    log.warning("%s", error)


def _end(order: WorkerOrder, report: MachineReport | None) -> str | None:
    """Return why a worker has ended, as far as its machine has reported it."""
    known = report.workers.get(order.worker) if report else None
    return known.ended if known is not None and known.start == order.start else None


# -- machines that joined --------------------------------------------------------------------------


def is_joined(machine_id: str) -> bool:
    """Return True if a machine joined by itself."""
    return machine_id.startswith(PREFIX)


class PresentMachines(JoinedFleet):
    """The machines that joined, as machines of a provider."""

    def __init__(self, machines: JoinedMachines) -> None:
        self._machines = machines

    def machines(self) -> list[Machine]:
        return [
            _with_state(joined.machine, report, end)
            for joined, report, end in self._present()
            if not joined.ordered
        ]

    def leaving(self) -> dict[str, float]:
        return {
            machine.name: end.by if end else report.at
            for machine, report, end in self._present()
            if machine.ordered and (report.leaving or end is not None)
        }

    def _present(self) -> list[tuple[JoinedMachine, MachineReport, MachineEnd | None]]:
        with _store_as_cloud():
            return self._machines.present()

    def end(self, machine_id: str, reason: str, seconds: float | None = None) -> None:
        with _store_as_cloud():
            self._machines.end(machine_id, reason, seconds)

    def remove(self, machine_id: str) -> None:
        with _store_as_cloud():
            self._machines.remove(machine_id)


@contextmanager
def _store_as_cloud() -> Iterator[None]:
    """Raise errors of the ledger as those of a cloud."""
    try:
        yield
    except StoreError as error:
        raise CloudUnavailable(str(error)) from error


def _with_state(machine: Machine, report: MachineReport, end: MachineEnd | None) -> Machine:
    if not report.leaving and end is None:
        return machine
    return machine.model_copy(
        update={
            "state": MachineState.LEAVING,
            "notice_at": end.by if end else report.at,
            "leaves": end is None,
        }
    )


# -- Ray -------------------------------------------------------------------------------------------


def connect_ray(settings: Settings) -> Cluster:
    """Return a connection to Ray. Raises :class:`~vcasgd.errors.ClusterError`."""
    token = settings.ray_token
    return Cluster.connect(
        settings.required("ray_address"),
        settings.cluster,
        CONNECT_SECONDS,
        token.get_secret_value() if token else None,
        tls=settings.ray_tls,
    )
