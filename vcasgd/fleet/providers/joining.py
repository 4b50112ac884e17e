"""Providers of machines that join through the gateway: by themselves, or ordered in a cluster."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from vcasgd.errors import NoCapacity
from vcasgd.fleet.pools import ExecPoolSpec, JoinPoolSpec, KubernetesPoolSpec, SlurmPoolSpec
from vcasgd.fleet.prices import ListPrice
from vcasgd.fleet.providers.base import LaunchOrder, Provider, offer_of
from vcasgd.schemas.costs import Offer
from vcasgd.schemas.fleet import Machine, MachineState
from vcasgd.spec.hardware import Hardware

#: Seconds that a machine has after an eviction without a time.
NOTICE_SECONDS = 30.0
_ORDERED_NAME = re.compile(r"join-(?P<pool>[a-z][a-z0-9-]{0,39})-[0-9a-f]{1,18}-[0-9]{1,7}")


class JoinedFleet:
    """Machines that joined. Calls may raise :class:`~vcasgd.errors.CloudUnavailable`.

    This one is for processes that don't know the ledger: it sees no machines.
    """

    def machines(self) -> list[Machine]:
        """Return the machines that are present and that no provider ordered."""
        return []

    def leaving(self) -> dict[str, float]:
        """Return when each ordered machine that leaves said so, in Unix seconds."""
        return {}

    def end(self, machine_id: str, reason: str, seconds: float | None = None) -> None:
        """Tell a machine to leave, within ``seconds`` or a usual time."""

    def remove(self, machine_id: str) -> None:
        """Remove a machine at once."""


def run_command(
    argv: Sequence[str], given: str, env: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run a command as :func:`subprocess.run` does; kill its own processes, too, if it hangs."""
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=env,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(given, seconds)
        except BaseException:
            # On Ctrl+C, too: a script's own commands would otherwise pile up.
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(argv, process.returncode, output, errors)


class JoinProvider(Provider[JoinPoolSpec]):
    """Provider for pools that buy nothing.

    Machines appear when they join, and vanish when they leave or stop reporting.
    """

    name = "join"
    max_terminated = 100

    def __init__(self, cluster: str, pools: Iterable[JoinPoolSpec], joined: JoinedFleet) -> None:
        super().__init__(cluster, pools)
        self._joined = joined

    def offers(self, pool: str) -> list[Offer]:
        """Return nothing, because nothing is for sale."""
        return []

    def machines(self) -> list[Machine]:
        return self._joined.machines()

    def terminate(self, *machine_ids: str) -> None:
        """Tell machines to leave. They may join again."""
        for machine_id in machine_ids:
            self._joined.end(machine_id, "the stack doesn't need this machine any more")

    def evict(self, machine_id: str, notice_seconds: float | None = None) -> None:
        seconds = NOTICE_SECONDS if notice_seconds is None else notice_seconds
        self._joined.end(machine_id, f"evicted at {time.strftime('%H:%M:%S')}", seconds)

    def kill(self, machine_id: str) -> None:
        """Remove a machine. Its agent kills the workers when it reports the next time."""
        self._joined.remove(machine_id)

    def _launch(self, order: LaunchOrder[JoinPoolSpec]) -> list[str]:
        pool = order.spec.name
        raise NoCapacity(f"machines of pool {pool} join by themselves")


def ordered_name(pool: str, launch: str, index: int | str) -> str:
    """Return the id of an ordered machine: the name under which it joins."""
    return f"join-{pool}-{launch}-{index}"


def pool_of_ordered(name: str) -> str | None:
    """Return the pool of an ordered machine; None if the name isn't one of those."""
    match = _ORDERED_NAME.fullmatch(name)
    return match["pool"] if match else None


@dataclass(frozen=True)
class Listed:
    """A machine in a cluster's list, and what only its provider needs to know of it."""

    machine: Machine
    """Without the pool's price, and whether it is a spot machine; see :data:`FROM_POOL`."""
    launch: str
    """The same for all machines of a launch."""
    boot_error: str | None = None
    """Why it doesn't start, or why it failed."""
    ended_at: float | None = None
    """Unix seconds."""
    price_per_hour: float | None = None
    """USD, if the cluster says so."""


#: Stands in a list for what the pool determines.
FROM_POOL: dict[str, Any] = {"price_per_hour": 0.0, "spot": True}
Ordered = TypeVar("Ordered", bound=SlurmPoolSpec | KubernetesPoolSpec | ExecPoolSpec)


class OrderedProvider(Provider[Ordered]):
    """Base of providers that order machines in a cluster, from where they join.

    ``joined`` says which agents leave, before their cluster knows it. Subclasses implement
    ``_launch_key``, ``_listed``, and ``_order``.
    """

    def __init__(self, cluster: str, pools: Iterable[Ordered], joined: JoinedFleet) -> None:
        super().__init__(cluster, pools)
        self._joined = joined

    def machines(self) -> list[Machine]:
        listed = self._listed()
        self._boot_errors = {one.machine.id: one.boot_error for one in listed}
        self._clean(listed)
        leaving = self._joined.leaving()
        return [
            self._completed(one, leaving.get(one.machine.id))
            for one in listed
            if one.machine.state is not MachineState.GONE
        ]

    def _launch(self, order: LaunchOrder[Ordered]) -> list[str]:
        spec = order.spec
        if order.spot is not spec.spot:
            kind = "spot" if spec.spot else "not spot"
            raise NoCapacity(f"{spec.name}: its machines are {kind}")
        launch = self._launch_key(spec.name, order.token)
        if granted := [one.machine.id for one in self._listed() if one.launch == launch]:
            return sorted(granted)
        return self._order(order, launch)

    def _launch_key(self, pool: str, token: str) -> str:
        """Return the text that marks all machines of a launch in their cluster."""
        raise NotImplementedError

    def _listed(self) -> list[Listed]:
        """Return the machines of this control plane, also those that have ended."""
        raise NotImplementedError

    def _order(self, order: LaunchOrder[Ordered], launch: str) -> list[str]:
        """Order machines, and return their ids."""
        raise NotImplementedError

    def _clean(self, listed: list[Listed]) -> None:
        """Remove what machines that have ended left in their cluster."""

    def _offer(self, spec: Ordered, zone: str, kind: str) -> Offer:
        price, on_demand = _prices(spec)
        hardware = Hardware(1.0, spec.template.memory_gb)
        listed = ListPrice(on_demand, None, hardware, time.time(), "the pools file")
        return offer_of(spec, zone, kind, price, listed)

    def _completed(self, listed: Listed, left_at: float | None) -> Machine:
        """Return a machine with what its pool determines.

        ``left_at``: when the machine's agent said that it leaves, if it did.
        """
        one, spec = listed.machine, self._pools.get(listed.machine.pool)
        price, on_demand = _prices(spec) if spec else (0.0, 0.0)
        zones, kinds = (spec.zones, spec.machine_types) if spec else (("",), ("",))
        if listed.price_per_hour is not None:
            price, on_demand = listed.price_per_hour, max(on_demand, listed.price_per_hour)
        known = {
            "price_per_hour": price,
            "spot": spec.spot if spec else True,
            "zone": one.zone if one.zone in zones else zones[0],
            "machine_type": one.machine_type if one.machine_type in kinds else kinds[0],
            "on_demand_price_per_hour": on_demand,
        }
        if left_at is not None:
            known |= {"state": MachineState.LEAVING, "notice_at": left_at}
        return one.model_copy(update=known)


def _prices(spec: SlurmPoolSpec | KubernetesPoolSpec | ExecPoolSpec) -> tuple[float, float]:
    """Return the price and the on-demand price of a pool's machines, in USD per hour."""
    price = spec.template.price_per_hour
    if not isinstance(spec, ExecPoolSpec) or spec.template.on_demand_price_per_hour is None:
        return price, price
    return price, spec.template.on_demand_price_per_hour
