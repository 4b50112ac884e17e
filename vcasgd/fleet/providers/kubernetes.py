"""Provider of machines that are pods of a Kubernetes cluster, and join through the gateway.

The only module that imports Kubernetes' official client. Names and labels say whose a pod is, so
that no other record is needed to find the machines again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import urllib3
from kubernetes import client, config
from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger
from pydantic import ValidationError

from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    InvalidRequest,
    QuotaExceeded,
    Throttled,
)
from vcasgd.fleet.pools import KubernetesPoolSpec
from vcasgd.fleet.providers.base import (
    CONNECTIONS,
    MACHINE_ID,
    LaunchOrder,
    fleet_error,
    one_line,
)
from vcasgd.fleet.providers.joining import (
    FROM_POOL,
    JoinedFleet,
    Listed,
    OrderedProvider,
    ordered_name,
    pool_of_ordered,
)
from vcasgd.schemas.fleet import Machine, MachineState
from vcasgd.spec.problems import first_mistake

T = TypeVar("T")

#: Machines of one launch, each of which is a request.
MAX_LAUNCHED = 50
#: Seconds for which pods that have ended stay, so that a person can read their logs.
KEPT_SECONDS = 600.0
#: Ended pods that are deleted at a time.
MAX_CLEANED = 20
#: Requests of one launch or deletion that are under way at the same time.
AT_A_TIME = 10
#: Seconds to connect, and to wait for an answer.
_TIMEOUT = (5, 20)
#: Seconds for a program that the kubeconfig names for credentials.
PLUGIN_SECONDS = 20.0
#: Pods in one answer.
_PAGE = 500


class KubernetesProvider(OrderedProvider[KubernetesPoolSpec]):
    """Provider for pools of one namespace.

    The names of pods derive from the launch's token. A pod that has ended is listed for some
    minutes, unless it was deleted.
    """

    name = "kubernetes"
    max_terminated = 20

    def __init__(
        self, cluster: str, pools: Iterable[KubernetesPoolSpec], joined: JoinedFleet
    ) -> None:
        super().__init__(cluster, pools, joined)
        template = next(iter(self._pools.values())).template
        self._namespace = template.namespace
        self._core = client.CoreV1Api(_api_client(template.context))

    def terminate(self, *machine_ids: str) -> None:
        """See the contract. Ignores pods of others."""
        self._delete(machine_ids)

    def evict(self, machine_id: str, notice_seconds: float | None = None) -> None:
        """Delete a pod, as a drain of its node does. The agent gets SIGTERM, and leaves."""
        self._delete([machine_id], notice_seconds)

    def kill(self, machine_id: str) -> None:
        self._delete([machine_id], 0)

    def close(self) -> None:
        self._core.api_client.close()

    def _launch_key(self, pool: str, token: str) -> str:
        return launch_name(self._cluster, pool, token)

    def _listed(self) -> list[Listed]:
        found: list[Listed | None] = []
        page: dict[str, Any] = {"label_selector": f"{CLUSTER_LABEL}={self._cluster}"}
        while True:
            with _errors():
                answer = self._core.list_namespaced_pod(
                    self._namespace, limit=_PAGE, _request_timeout=_TIMEOUT, **page
                )
            found += map(machine_of, answer.items)
            if not answer.metadata.var_continue:
                return [one for one in found if one is not None]
            page["_continue"] = answer.metadata.var_continue

    def _order(self, order: LaunchOrder[KubernetesPoolSpec], launch: str) -> list[str]:
        count = min(order.count, MAX_LAUNCHED)
        pods = [manifest(order, self._cluster, launch, index) for index in range(count)]
        errors = _each(lambda pod: self._create(pod, order.spec.name), pods)
        created = [
            pod["metadata"]["name"] for pod, error in zip(pods, errors, strict=True) if not error
        ]
        if not created and errors[0] is not None:
            raise errors[0]  # Otherwise the next launch meets it first.
        return created

    def _clean(self, listed: list[Listed]) -> None:
        """Delete pods that ended some minutes ago."""
        before = time.time() - KEPT_SECONDS
        old = [one.machine.id for one in listed if one.ended_at and one.ended_at < before]
        _each(self._delete_pod, old[:MAX_CLEANED])  # They cost nothing, so errors don't matter.

    def _create(self, pod: dict[str, Any], pool: str) -> None:
        """Create a pod, unless there is one with its name."""
        options = {"_request_timeout": _TIMEOUT, "_preload_content": False}
        try:
            with _errors(pool):
                self._core.create_namespaced_pod(self._namespace, pod, **options).release_conn()
        except InvalidRequest as error:
            if error.code != "AlreadyExists":
                raise

    def _delete(self, machines: Iterable[str], grace_seconds: float | None = None) -> None:
        wanted, alive = set(machines), []
        for one in (listed.machine for listed in self._listed()):
            leaves = one.notice_at is not None and grace_seconds != 0
            if one.id in wanted and not leaves and one.state is not MachineState.GONE:
                alive.append(one.id)
        for error in _each(lambda name: self._delete_pod(name, grace_seconds), alive):
            if error is not None:
                raise error

    def _delete_pod(self, name: str, grace_seconds: float | None = None) -> None:
        """Delete a pod, whose processes then have some time; None means the pod's own."""
        options: dict[str, Any] = {"_request_timeout": _TIMEOUT, "_preload_content": False}
        if grace_seconds is not None:
            options["grace_period_seconds"] = int(grace_seconds)
        try:
            with _errors():
                self._core.delete_namespaced_pod(name, self._namespace, **options).release_conn()
        except InvalidRequest as error:
            if error.code != "NotFound":
                raise


def _each(call: Callable[[T], None], things: Sequence[T]) -> list[FleetError | None]:
    """Call the API server for each of several things, some at a time, and return the errors."""

    def attempt(thing: T) -> FleetError | None:
        try:
            call(thing)
        except FleetError as error:
            return error
        return None

    with ThreadPoolExecutor(AT_A_TIME) as threads:
        return list(threads.map(attempt, things))


def _api_client(context: str | None) -> client.ApiClient:
    settings, file = client.Configuration(), os.environ.get("KUBECONFIG") or None
    try:
        if context is None and not file and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=settings)
        else:
            _load_kubeconfig(file or config.KUBE_CONFIG_DEFAULT_LOCATION, context, settings)
    except Exception as error:  # The library checks little of what it reads.
        why = one_line(f"{type(error).__name__}: {error}")
        raise InvalidRequest(
            f"there is no access to a Kubernetes cluster: {why}",
            remedy="set KUBECONFIG, or run the controller in the cluster with a service account",
        ) from error
    settings.retries = 0
    settings.connection_pool_maxsize = CONNECTIONS
    return client.ApiClient(settings)


def _load_kubeconfig(files: str, context: str | None, settings: client.Configuration) -> None:
    """Load a kubeconfig as :func:`kubernetes.config.load_kube_config` does.

    That waits for a program for credentials without limit, now and before each later request.
    """
    merged = KubeConfigMerger(files)
    for entry in merged.config.value["users"] if merged.config else ():
        user = entry.value.get("user") or {}
        if plugin := user.get("exec"):
            command = [plugin["command"], *(plugin.get("args") or ())]
            limit = ["-k", "1", str(PLUGIN_SECONDS)]
            limited = {**plugin, "command": "timeout", "args": [*limit, *command]}
            # A copy, so that the library doesn't save it in the file.
            entry.value = {**entry.value, "user": {**user, "exec": limited}}
    loader = KubeConfigLoader(
        merged.config, active_context=context, config_base_path=None,
        config_persister=merged.save_changes,
    )  # fmt: skip
    loader.load_and_set(settings)


@contextmanager
def _errors(pool: str | None = None) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        # The client checks what it sends, and what it gets.
        why = first_mistake(error)
        if pool is None:
            # A list without some machines would mean that these are gone.
            raise CloudUnavailable(
                f"the API server lists pods that can't be read: {why}"
            ) from error
        raise InvalidRequest(
            f"{pool}: the pod is not valid: {why}", remedy="check the pool's template"
        ) from error
    except client.ApiException as error:
        raise error_of(error.status or 0, error.body, pool) from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise CloudUnavailable(f"the API server doesn't answer: {str(error)[:200]}") from error


def error_of(status: int, body: bytes | str | None, pool: str | None = None) -> FleetError:
    """Convert an answer of the API server, whose body is a ``Status`` if all is well."""
    try:
        parsed = json.loads(body or b"")
    except ValueError:
        parsed = None
    answer = parsed if isinstance(parsed, dict) else {}
    message, reason = str(answer.get("message") or ""), str(answer.get("reason") or "")
    kind, remedy = _kind(status, reason, message)
    text = message[:300] or f"the API server answers {status}"
    remedies = {kind: remedy} if remedy else {}
    return fleet_error(kind, text, remedies=remedies, pool=pool, code=reason or None)


def _kind(status: int, reason: str, message: str) -> tuple[type[FleetError], str | None]:
    if status == 403 and "exceeded quota" in message:
        return QuotaExceeded, "raise the namespace's ResourceQuota, or set max_machines"
    if status == 401:
        return (
            CloudDenied,
            "check the kubeconfig, and that its program for credentials answers",
        )
    if status == 403:
        return CloudDenied, "allow the stack to create, list, and delete pods in the namespace"
    if status == 404:
        return InvalidRequest, "check the pool's namespace"
    if status in (400, 422) or reason == "AlreadyExists":
        return InvalidRequest, "check the pool's template"
    return (Throttled if status == 429 else CloudUnavailable), None


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
#: Container of the machine; a cluster may add others to each pod.
_CONTAINER = "machine"


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
        "name": _CONTAINER,
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


def machine_of(pod: Any) -> Listed | None:
    """Return a ``V1Pod`` as a machine; None for a pod to which another user gave our label."""
    name, labels = pod.metadata.name, pod.metadata.labels or {}
    pool = pool_of_ordered(name)
    if pool is None or labels.get(POOL_LABEL) != pool:
        return None
    status, deleted = pod.status, pod.metadata.deletion_timestamp
    states = {each.name: each.state for each in status.container_statuses or ()}
    container = states.get(_CONTAINER)
    waiting = container.waiting if container else None
    terminated = container.terminated if container else None
    created, ended_at = pod.metadata.creation_timestamp, None
    if status.phase in _ENDED:
        ended_at = ((terminated and terminated.finished_at) or created).timestamp()
    return Listed(
        Machine(
            id=name,
            pool=pool,
            state=_state(status.phase, pod.spec.node_name, leaves=deleted is not None),
            launched_at=(status.start_time or created).timestamp(),
            notice_at=deleted.timestamp() if deleted else None,
            host=pod.spec.node_name or "",
            zone=labels.get(ZONE_LABEL, ""),
            **FROM_POOL,
        ),
        launch=labels.get(LAUNCH_LABEL, ""),
        boot_error=_problem(status, waiting, terminated),
        ended_at=ended_at,
    )


def _state(phase: str, node: str | None, *, leaves: bool) -> MachineState:
    if phase in _ENDED:
        return MachineState.GONE
    if leaves:
        return MachineState.LEAVING
    if phase != "Pending":
        return MachineState.RUNNING
    return MachineState.BOOTING if node else MachineState.WAITING


def _problem(status: Any, waiting: Any, terminated: Any) -> str | None:
    if waiting and waiting.reason in _STUCK:
        return one_line(f"{waiting.reason}: {waiting.message or ''}")
    # Other containers may run on.
    if status.phase != "Failed" and not (terminated and terminated.exit_code):
        return None
    ended = terminated or status
    # The end of a message has the error.
    return one_line(f"{ended.reason or 'Failed'}: {(ended.message or '').strip()[-200:]}")
