"""A machine as the manifest of a pod."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vcasgd.fleet.pools import KubernetesPoolSpec
from vcasgd.fleet.providers.base import MACHINE_ID
from vcasgd.fleet.providers.kubernetes.names import (
    CLUSTER_LABEL,
    LAUNCH_LABEL,
    POOL_LABEL,
    ZONE_LABEL,
    PodName,
)

CONTAINER = "machine"
#: Labels that Kubernetes and its clouds give to nodes.
_ZONE, _TYPE = "topology.kubernetes.io/zone", "node.kubernetes.io/instance-type"


def pod(
    spec: KubernetesPoolSpec,
    cluster: str,
    machine: PodName,
    argv: Sequence[str],
    zones: Sequence[str],
    machine_types: Sequence[str],
) -> dict[str, Any]:
    """Return the manifest of a machine that runs ``argv``, on one of the given nodes.

    The pod ends with its container: the plan replaces machines that leave, perhaps elsewhere. The
    token is only named here, so that nobody who may read pods sees it.
    """
    template = spec.template
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
                **({ZONE_LABEL: zones[0]} if len(zones) == 1 else {}),
            },
        },
        "spec": {
            "automountServiceAccountToken": False,
            **template.pod,
            **_affinity(spec, zones, machine_types),
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": template.grace_seconds,
            "containers": [_container(spec, str(machine), argv)],
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
