"""Machines that joined by themselves, as machines of a provider."""

from __future__ import annotations

from vcasgd.errors import CloudUnavailable, StoreError
from vcasgd.fleet.providers.base import Machine, MachineState
from vcasgd.store.ledger.machines import (
    PREFIX,
    JoinedMachine,
    JoinedMachines,
    MachineEnd,
    MachineReport,
)


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
