"""Conversion of Compute Engine's machines and prices to plain data."""

from __future__ import annotations

import contextlib
from datetime import datetime
from typing import Any

from vcasgd.errors import SpecError
from vcasgd.fleet.pools import GcpPoolSpec
from vcasgd.fleet.prices import ListPrice, PriceTable
from vcasgd.fleet.providers.base import Machine, MachineState
from vcasgd.fleet.providers.gcp.request import POOL_LABEL

#: States of machines that still exist.
STATES = {
    "PROVISIONING": MachineState.BOOTING,
    "STAGING": MachineState.BOOTING,
    "RUNNING": MachineState.RUNNING,
    "REPAIRING": MachineState.RUNNING,
    # Half a minute, in which a worker pushes its progress.
    "PENDING_STOP": MachineState.LEAVING,
    "STOPPING": MachineState.LEAVING,
    # A stopped machine is listed as running, so the plan gives it up as lost and ends it.
    "SUSPENDING": MachineState.RUNNING,
    "SUSPENDED": MachineState.RUNNING,
    "STOPPED": MachineState.RUNNING,
    "TERMINATED": MachineState.RUNNING,
}


def machine_of(machine: Any, table: PriceTable) -> Machine:
    """Convert a ``compute_v1.Instance`` in one of :data:`STATES`."""
    kind, zone = last(machine.machine_type), last(machine.zone)
    region = zone.rpartition("-")[0]
    on_demand = table.price_or_highest(region, kind)
    price = on_demand
    if is_spot(machine):
        with contextlib.suppress(SpecError):
            price = table.price(region, kind).spot or on_demand
    return Machine(
        id=machine.name,
        pool=machine.labels.get(POOL_LABEL, ""),
        state=STATES[machine.status],
        launched_at=datetime.fromisoformat(machine.creation_timestamp).timestamp(),
        notice_at=None,
        host=next((each.network_i_p for each in machine.network_interfaces), ""),
        price_per_hour=price,
        spot=is_spot(machine),
        zone=zone,
        machine_type=kind,
        on_demand_price_per_hour=on_demand,
    )


def priced(spec: GcpPoolSpec, kind: str, table: PriceTable) -> tuple[ListPrice, float]:
    """Return a type's list price, and its price in this pool. Raises :class:`SpecError`."""
    listed = table.price(spec.region, kind)
    price = listed.spot if spec.spot else listed.on_demand
    if price is None:
        raise SpecError(
            f"no known spot price for {kind} in {spec.region}",
            remedy=f"add it under gcp.spot.{spec.region} to the file that VCASGD_PRICES names",
            field="machine_types",
        )
    return listed, price


def is_spot(machine: Any) -> bool:
    """Return True for a spot machine."""
    return bool(machine.scheduling.provisioning_model == "SPOT")


def last(path: str) -> str:
    """Return the last part of a URL or path."""
    return path.rpartition("/")[2]
