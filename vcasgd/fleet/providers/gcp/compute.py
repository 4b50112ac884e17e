"""Compute Engine's machines, prices, and requests as plain data."""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from vcasgd.errors import SpecError
from vcasgd.fleet.pools import GcpPoolSpec
from vcasgd.fleet.prices import ListPrice, PriceTable
from vcasgd.fleet.providers.base import Machine, MachineState
from vcasgd.fleet.providers.pooled import LaunchOrder

CLUSTER_LABEL = "vcasgd-cluster"
POOL_LABEL = "vcasgd-pool"
LAUNCH_LABEL = "vcasgd-launch"
USER_DATA_KEY = "user-data"
#: Guest attribute that the machine itself writes.
BOOT_ERROR_ATTRIBUTE = "vcasgd/boot-error"

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


def names_of(cluster: str, pool: str, token: str, count: int) -> list[str]:
    """Return the names of a launch's machines, which are their ids; equal for equal tokens.

    A role that ends machines can be limited to names that begin with the cluster's. Terraform
    allows no two dashes in the cluster's name, so no other cluster's machines have such names.
    """
    return sorted(
        f"vcasgd-{cluster}--{_digest(cluster, pool, token, str(index))[:12]}"
        for index in range(count)
    )


def launch_label(token: str) -> str:
    """Return the label for a token: at most 63 characters, without capital letters."""
    return _digest(token)[:32]


def request_id(*parts: str) -> str:
    """Return a request id, by which Google recognizes a repeated request for an hour."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "/".join(("vcasgd", *parts))))


def launch_resource(
    order: LaunchOrder[GcpPoolSpec], cluster: str, kind: str, metadata: Mapping[str, str]
) -> dict[str, Any]:
    """Return a ``BulkInsertInstanceResource``; ``metadata`` replaces that of the template."""
    spec = order.spec
    names = names_of(cluster, spec.name, order.token, order.count)
    return {
        "count": len(names),
        "min_count": 1,
        "per_instance_properties": {name: {"name": name} for name in names},
        "source_instance_template": template_path(spec),
        "instance_properties": {
            "machine_type": kind,
            "scheduling": _scheduling(spot=order.spot, gpus=bool(spec.gpus)),
            "labels": {
                CLUSTER_LABEL: cluster,
                POOL_LABEL: spec.name,
                LAUNCH_LABEL: launch_label(order.token),
            },
            "metadata": {
                "items": [{"key": key, "value": metadata[key]} for key in sorted(metadata)]
            },
            **_network(spec),
            **_identity(spec),
        },
    }


def template_path(spec: GcpPoolSpec) -> str:
    """Return the path of a template, which is global unless it is given as a path."""
    name = spec.template.instance_template
    path = name if "/" in name else f"global/instanceTemplates/{name}"
    return f"projects/{spec.template.project}/{path}"


def labelled(name: str, value: str) -> str:
    """Return a filter for listings by label."""
    return f'(labels.{name} = "{value}")'


def _scheduling(*, spot: bool, gpus: bool) -> dict[str, Any]:
    if not spot:
        # machines with GPUs can't be moved while they run
        fixed = {"on_host_maintenance": "TERMINATE", "automatic_restart": False} if gpus else {}
        return {"provisioning_model": "STANDARD", **fixed}
    return {
        "provisioning_model": "SPOT",
        "instance_termination_action": "DELETE",
        "on_host_maintenance": "TERMINATE",
        "automatic_restart": False,
    }


def _network(spec: GcpPoolSpec) -> dict[str, Any]:
    template = spec.template
    if template.network is None and template.subnetwork is None:
        return {}
    named = {"network": template.network, "subnetwork": template.subnetwork}
    return {"network_interfaces": [{key: value for key, value in named.items() if value}]}


def _identity(spec: GcpPoolSpec) -> dict[str, Any]:
    if spec.template.service_account is None:
        return {}
    scope = "https://www.googleapis.com/auth/cloud-platform"
    return {"service_accounts": [{"email": spec.template.service_account, "scopes": [scope]}]}


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
