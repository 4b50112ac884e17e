"""A machine as the manifest of a pod, and the names and labels that say whose it is.

They are all that is needed to find the machines again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vcasgd.fleet.pools import KubernetesPoolSpec
from vcasgd.fleet.providers.base import MACHINE_ID
from vcasgd.fleet.providers.pooled import LaunchOrder

CLUSTER_LABEL = "vcasgd.dev/cluster"
POOL_LABEL = "vcasgd.dev/pool"
LAUNCH_LABEL = "vcasgd.dev/launch"
#: Zone that a launch was restricted to; the zone of a node is not visible to the control plane.
ZONE_LABEL = "vcasgd.dev/zone"

_MACHINE = re.compile(
    r"join-(?P<pool>[a-z][a-z0-9-]{0,39})-(?P<launch>[0-9a-f]{12})-(?P<index>[0-9]{1,4})"
)

CONTAINER = "machine"
#: Labels that Kubernetes and its clouds give to nodes.
_ZONE, _TYPE = "topology.kubernetes.io/zone", "node.kubernetes.io/instance-type"


def launch_name(cluster: str, pool: str, token: str) -> str:
    """Return the name of a launch, which is part of the names of its pods.

    A second creation of a pod with the same name is refused, so a launch can be repeated.
    """
    return hashlib.sha256(f"{cluster}/{pool}/{token}".encode()).hexdigest()[:12]


@dataclass(frozen=True)
class PodName:
    """Name of a machine: its pool, the launch, and its number in the launch."""

    pool: str
    launch: str
    index: int

    def __str__(self) -> str:
        return f"join-{self.pool}-{self.launch}-{self.index}"

    @classmethod
    def parse(cls, name: str) -> PodName | None:
        """Parse the name of a machine; None if it isn't one of a Kubernetes pool."""
        match = _MACHINE.fullmatch(name)
        return cls(match["pool"], match["launch"], int(match["index"])) if match else None


def pod(order: LaunchOrder[KubernetesPoolSpec], cluster: str, machine: PodName) -> dict[str, Any]:
    """Return the manifest of a machine of a launch.

    The pod ends with its container: the plan replaces machines that leave, perhaps elsewhere. The
    token is only named here, so that nobody who may read pods sees it.
    """
    spec, template = order.spec, order.spec.template
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": str(machine),
            "labels": {
                "app.kubernetes.io/name": "vcasgd",
                CLUSTER_LABEL: cluster,
                POOL_LABEL: machine.pool,
                LAUNCH_LABEL: machine.launch,
                **({ZONE_LABEL: order.zones[0]} if len(order.zones) == 1 else {}),
            },
        },
        "spec": {
            "automountServiceAccountToken": False,
            **template.pod,
            **_affinity(spec, order.zones, order.machine_types),
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": template.grace_seconds,
            "containers": [_container(spec, str(machine), order.boot.argv)],
        },
    }


def _container(spec: KubernetesPoolSpec, machine: str, argv: Sequence[str]) -> dict[str, Any]:
    template = spec.template
    requests: dict[str, str] = {"cpu": f"{spec.cpus or 1:g}"}
    limits: dict[str, str] = {}
    if template.memory:
        requests["memory"] = limits["memory"] = template.memory
    if spec.gpus:
        limits["nvidia.com/gpu"] = str(spec.gpus)
    token = {"name": template.token_secret, "key": "token"}
    return {
        "resources": {"requests": requests, "limits": limits},
        # The last lines of its output say why it failed.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **template.container,
        "name": CONTAINER,
        "image": template.image,
        "command": [each.replace(MACHINE_ID, machine) for each in argv],
        "env": [
            *template.container.get("env", ()),
            {"name": "VCASGD_TOKEN", "valueFrom": {"secretKeyRef": token}},
        ],
    }


def _affinity(
    spec: KubernetesPoolSpec, zones: Sequence[str], machine_types: Sequence[str]
) -> dict[str, Any]:
    expressions = [
        {"key": key, "operator": "In", "values": list(values)}
        for key, values, given in (
            (_ZONE, zones, "zones" in spec.model_fields_set),
            (_TYPE, machine_types, "machine_types" in spec.model_fields_set),
        )
        if given
    ]
    if not expressions:
        return {}
    terms = {"nodeSelectorTerms": [{"matchExpressions": expressions}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}
