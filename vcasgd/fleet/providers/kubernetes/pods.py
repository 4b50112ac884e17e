"""Pods as machines: their manifests, and how Kubernetes reports them.

Names and labels say whose a pod is, so that no other record is needed to find the machines again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from vcasgd.fleet.pools import KubernetesPoolSpec
from vcasgd.fleet.providers.base import MACHINE_ID, MachineState, one_line
from vcasgd.fleet.providers.joining import OrderedMachine, ordered_name, pool_of_ordered
from vcasgd.fleet.providers.pooled import LaunchOrder

CLUSTER_LABEL = "vcasgd.dev/cluster"
POOL_LABEL = "vcasgd.dev/pool"
LAUNCH_LABEL = "vcasgd.dev/launch"
#: Zone that a launch was restricted to; the zone of a node is not visible to the control plane.
ZONE_LABEL = "vcasgd.dev/zone"
#: Labels that Kubernetes and its clouds give to nodes.
_ZONE, _TYPE = "topology.kubernetes.io/zone", "node.kubernetes.io/instance-type"

#: Reasons of a container that waits and won't start by itself.
_STUCK = (
    "CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull", "ErrImagePull",
    "ImagePullBackOff", "InvalidImageName", "RunContainerError",
)  # fmt: skip
_ENDED = ("Succeeded", "Failed")


def launch_name(cluster: str, pool: str, token: str) -> str:
    """Return the name of a launch, which is part of the names of its pods.

    A second creation of a pod with the same name is refused, so a launch can be repeated.
    """
    return hashlib.sha256(f"{cluster}/{pool}/{token}".encode()).hexdigest()[:12]


def manifest(
    order: LaunchOrder[KubernetesPoolSpec], cluster: str, launch: str, index: int
) -> dict[str, Any]:
    """Return the manifest of the pod of a machine of a launch.

    The pod ends with its container: the plan replaces machines that leave, perhaps elsewhere. The
    token is only named here, so that nobody who may read pods sees it.
    """
    spec, template = order.spec, order.spec.template
    machine = ordered_name(spec.name, launch, index)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": machine,
            "labels": {
                "app.kubernetes.io/name": "vcasgd",
                CLUSTER_LABEL: cluster,
                POOL_LABEL: spec.name,
                LAUNCH_LABEL: launch,
                **({ZONE_LABEL: order.zones[0]} if len(order.zones) == 1 else {}),
            },
        },
        "spec": {
            "automountServiceAccountToken": False,
            **template.pod,
            **_affinity(spec, order.zones, order.machine_types),
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": template.grace_seconds,
            "containers": [_container(spec, machine, order.boot.argv)],
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
        "name": "machine",
        "image": template.image,
        "command": [argument.replace(MACHINE_ID, machine) for argument in argv],
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


def machine_of(pod: Any) -> OrderedMachine | None:
    """Return a ``V1Pod`` as a machine; None for a pod to which another user gave our label."""
    name, labels = pod.metadata.name, pod.metadata.labels or {}
    pool = pool_of_ordered(name)
    if pool is None or labels.get(POOL_LABEL) != pool:
        return None
    status, deleted = pod.status, pod.metadata.deletion_timestamp
    container = status.container_statuses[0].state if status.container_statuses else None
    waiting = container.waiting if container else None
    terminated = container.terminated if container else None
    created, ended_at = pod.metadata.creation_timestamp, None
    if status.phase in _ENDED:
        ended_at = ((terminated and terminated.finished_at) or created).timestamp()
    return OrderedMachine(
        id=name,
        pool=pool,
        launch=labels.get(LAUNCH_LABEL, ""),
        state=_state(status.phase, leaves=deleted is not None),
        launched_at=(status.start_time or created).timestamp(),
        notice_at=deleted.timestamp() if deleted else None,
        host=pod.spec.node_name or "",
        zone=labels.get(ZONE_LABEL, ""),
        problem=_problem(status, waiting, terminated),
        ended_at=ended_at,
    )


def _state(phase: str, *, leaves: bool) -> MachineState:
    if phase in _ENDED:
        return MachineState.GONE
    if leaves:
        return MachineState.LEAVING
    return MachineState.BOOTING if phase == "Pending" else MachineState.RUNNING


def _problem(status: Any, waiting: Any, terminated: Any) -> str | None:
    if waiting and waiting.reason in _STUCK:
        return one_line(f"{waiting.reason}: {waiting.message or ''}")
    if status.phase != "Failed":
        return None
    ended = terminated or status
    # The end of a message has the error.
    return one_line(f"{ended.reason or 'Failed'}: {(ended.message or '').strip()[-200:]}")
