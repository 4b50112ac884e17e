"""Requests to Compute Engine as plain data: names, filters, and the request of a launch."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from typing import Any

from vcasgd.fleet.pools import GcpPoolSpec
from vcasgd.fleet.providers.pooled import LaunchOrder

CLUSTER_LABEL = "vcasgd-cluster"
POOL_LABEL = "vcasgd-pool"
LAUNCH_LABEL = "vcasgd-launch"
USER_DATA_KEY = "user-data"
#: Guest attribute that the machine itself writes.
BOOT_ERROR_ATTRIBUTE = "vcasgd/boot-error"


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
