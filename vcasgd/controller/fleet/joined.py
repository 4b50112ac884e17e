"""Machines that joined by themselves, as the fleet loop sees them: machines and workplaces."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Protocol

from vcasgd.cluster import ActorState, Cluster, Node, WorkerState
from vcasgd.errors import CloudUnavailable, ClusterError, StoreError
from vcasgd.fleet.machine.notices import Notice
from vcasgd.fleet.providers.base import Machine, MachineState
from vcasgd.store.ledger.joined_machines import (
    PREFIX,
    JoinedMachine,
    JoinedMachines,
    MachineEnd,
    MachineReport,
    WorkerOrder,
)
from vcasgd.worker_names import job_of, machine_of


class Workplaces(Protocol):
    """Places where workers run: Ray's cluster, or also machines that joined by themselves.

    :class:`~vcasgd.cluster.Cluster` describes the methods.
    """

    def nodes(self) -> list[Node]: ...

    def workers(self) -> dict[str, WorkerState]: ...

    def notices(self) -> dict[str, Notice]: ...

    def start_worker(
        self,
        machine_id: str,
        name: str,
        entry: str,
        arguments: dict[str, Any],
        env: dict[str, str],
    ) -> None: ...

    def stop_worker(self, name: str) -> None: ...


def is_joined(machine_id: str) -> bool:
    """Return True if a machine joined by itself."""
    return machine_id.startswith(PREFIX)


class PresentMachines:
    """The machines that joined, as machines of a provider."""

    def __init__(self, machines: JoinedMachines) -> None:
        self._machines = machines

    def machines(self) -> list[Machine]:
        """Return the machines that are present and that no provider ordered.

        Raises :class:`CloudUnavailable`.
        """
        return [_machine(*each) for each in self._present() if not each[0].ordered]

    def leaving(self) -> dict[str, float]:
        """Return when each ordered machine that leaves said so. Raises :class:`CloudUnavailable`.

        Times are Unix seconds.
        """
        return {
            machine.name: end.by if end else report.at
            for machine, report, end in self._present()
            if machine.ordered and (report.leaving or end is not None)
        }

    def _present(self) -> list[tuple[JoinedMachine, MachineReport, MachineEnd | None]]:
        try:
            return self._machines.present()
        except StoreError as error:
            raise CloudUnavailable(str(error)) from error

    def end(self, machine_id: str, reason: str, seconds: float | None = None) -> None:
        """Tell a machine to leave. Raises :class:`CloudUnavailable`."""
        try:
            self._machines.end(machine_id, reason, seconds)
        except StoreError as error:
            raise CloudUnavailable(str(error)) from error

    def remove(self, machine_id: str) -> None:
        """Remove a machine at once. Raises :class:`CloudUnavailable`."""
        try:
            self._machines.remove(machine_id)
        except StoreError as error:
            raise CloudUnavailable(str(error)) from error


def _machine(machine: JoinedMachine, report: MachineReport, end: MachineEnd | None) -> Machine:
    leaves = report.leaving or end is not None
    return Machine(
        id=machine.name,
        pool=machine.pool,
        state=MachineState.LEAVING if leaves else MachineState.RUNNING,
        launched_at=machine.joined_at,
        notice_at=end.by if end else report.at if leaves else None,
        host=machine.host,
        price_per_hour=0.0,
        spot=True,
        zone="anywhere",
        machine_type=machine_type(machine),
    )


def machine_type(machine: JoinedMachine) -> str:
    """Return a type by which speeds are compared: machines of one type are about equally fast."""
    if machine.gpus:
        name = "-".join(machine.gpu.lower().split()) or "gpu"
        return f"{machine.gpus}x{name}"
    return f"{machine.cpus:g}-cpu"


class MixedWorkplaces:
    """Workers on Ray's cluster and on machines that joined; see :class:`Workplaces`.

    ``connect`` returns the connection to Ray, and is called when a round first needs it:
    ``needs_ray()`` is False while no pool has machines in Ray.
    """

    def __init__(
        self,
        machines: JoinedMachines,
        connect: Callable[[], Cluster],
        needs_ray: Callable[[], bool],
    ) -> None:
        self._machines = machines
        self._connect = connect
        self._needs_ray = needs_ray
        self._ray: Cluster | None = None
        self._present: dict[str, MachineReport] = {}

    def nodes(self) -> list[Node]:
        """Return the nodes of Ray, and the machines that joined.

        Raises :class:`ClusterError` if Ray's head was lost.
        """
        if self._ray is None and self._needs_ray():
            self._ray = self._connect()
        self._present = {each.name: report for each, report, _ in self._machines.present()}
        joined = [Node(name, name, alive=True, host="") for name in self._present]
        return joined + (self._ray.nodes() if self._ray else [])

    def workers(self) -> dict[str, WorkerState]:
        """Return the workers on the machines of :meth:`nodes`, and forget those of lost ones."""
        workers = self._ray.workers() if self._ray else {}
        all_orders = self._machines.all_orders()
        self._machines.forget_orders(*(all_orders.keys() - self._present.keys()))
        for machine, report in self._present.items():
            for order in all_orders.get(machine, []):
                workers[order.worker] = _state(machine, order, report)
        return workers

    def notices(self) -> dict[str, Notice]:
        """Return the notices of Ray's machines; those that joined report theirs."""
        return self._ray.notices() if self._ray else {}

    def start_worker(
        self,
        machine_id: str,
        name: str,
        entry: str,
        arguments: dict[str, Any],
        env: dict[str, str],
    ) -> None:
        """Start a worker; on a machine that joined, its agent does at its next report."""
        if not is_joined(machine_id):
            self._require_ray().start_worker(machine_id, name, entry, arguments, env)
            return
        orders, report = self._machines.orders_of(machine_id), self._present.get(machine_id)
        if report is None:
            raise ClusterError(f"machine {machine_id} is lost")
        alive = [each for each in orders if _state(machine_id, each, report).state != _DEAD]
        if any(each.worker == name for each in alive):
            return
        order = WorkerOrder(worker=name, job=job_of(name), start=secrets.token_hex(8), env=env)
        self._machines.set_orders(machine_id, [*alive, order])

    def stop_worker(self, name: str) -> None:
        """Kill a worker, if it exists."""
        machine = machine_of(name)
        if not is_joined(machine):
            self._require_ray().stop_worker(name)
            return
        orders = self._machines.orders_of(machine)
        left = [each for each in orders if each.worker != name]
        if len(left) < len(orders):
            self._machines.set_orders(machine, left)

    def _require_ray(self) -> Cluster:
        if self._ray is None:
            raise ClusterError("no pool needs Ray, so there is no connection to it")
        return self._ray


_DEAD = ActorState.DEAD


def _state(machine: str, order: WorkerOrder, report: MachineReport) -> WorkerState:
    known = report.workers.get(order.worker)
    if known is None or known.start != order.start:
        return WorkerState(order.worker, machine, ActorState.PENDING)
    if known.ended is not None:
        return WorkerState(order.worker, machine, ActorState.DEAD, known.ended)
    return WorkerState(order.worker, machine, ActorState.ALIVE)
