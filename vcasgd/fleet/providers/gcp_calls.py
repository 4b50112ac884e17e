"""Calls of Google Cloud: clients, errors, requests and machines as plain data, and account limits.

Only this module and :mod:`vcasgd.fleet.providers.gcp` import google.cloud.
"""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime
from http import HTTPStatus
from typing import Any, TypeVar

from google.api_core.exceptions import GoogleAPICallError, GoogleAPIError
from google.auth import default
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import GoogleAuthError, TransportError
from google.auth.transport.requests import AuthorizedSession
from google.cloud import compute_v1

from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    InvalidRequest,
    NoCapacity,
    QuotaExceeded,
    SpecError,
    Throttled,
)
from vcasgd.fleet.pools import GcpPoolSpec
from vcasgd.fleet.prices import ListPrice, PriceTable
from vcasgd.fleet.providers.base import AccountAnswer, AccountQuota, LaunchOrder, refusal_of
from vcasgd.schemas.fleet import Machine, MachineState

T = TypeVar("T")

#: Time limit of a call.
CALL_SECONDS = 20.0
#: Patterns of the codes of operations, and of the reasons and states of refused requests:
#: https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-vm-creation,
#: https://cloud.google.com/apis/design/errors.
CODES: dict[type[FleetError], str] = {
    Throttled: "rate_?(limit)?_?exceeded|^RESOURCE_EXHAUSTED$",
    NoCapacity: "EXHAUSTED|STOCKOUT|VM_MIN_COUNT_NOT_REACHED|CAPACITY_NOT_AVAILABLE"
    "|UNSUPPORTED_OPERATION_IN_ZONE",
    QuotaExceeded: "(quota|limit)_?exceeded|^billingNotEnabled|^QUOTA_",
    CloudDenied: "permission|denied|unauthenticated|forbidden|NotConfigured|disabled|^authError"
    "|^required$|policy|condition_?not_?met|^CONSUMER_INVALID",
    CloudUnavailable: "^internal|^backendError|^serverError|unavailable|timeout|^ABORTED|^CANCELLED"
    "|^UNKNOWN$|^DATA_LOSS|^DEADLINE_EXCEEDED|CANCELED_BY_USER|RESOURCE_STATE_CHANGED",
}


def client_options(url: str | None) -> dict[str, Any]:
    """Return the options of clients with this process's credentials."""
    return {"credentials": _credentials(url), "client_options": {"api_endpoint": url}}


def _credentials(url: str | None) -> Any:
    """Return this process's credentials; none for plain HTTP."""
    if url is not None and url.startswith("http://"):
        return AnonymousCredentials()
    return default(scopes=[_SCOPE])[0]


def limits(seconds: float = CALL_SECONDS) -> dict[str, Any]:
    """Return the time limit of a call; by default, the library retries for ten minutes."""
    return {"timeout": seconds, "retry": None}


def call(
    method: Callable[..., Any],
    arguments: Mapping[str, Any],
    pool: str | None = None,
    zone: str | None = None,
    *,
    seconds: float = CALL_SECONDS,
) -> Any:
    """Call a method of one of Google's clients. Raises :class:`~vcasgd.errors.FleetError`."""
    return attempt(lambda: method(arguments, **limits(seconds)), pool, zone)


def attempt(request: Callable[[], T], pool: str | None = None, zone: str | None = None) -> T:
    """Call Google. Raises the :class:`~vcasgd.errors.FleetError` that its error maps to."""
    try:
        return request()
    except GoogleAPICallError as error:
        # Without a status, the request may have been completed.
        status = int(error.code) if error.code else HTTPStatus.SERVICE_UNAVAILABLE
        text = error.message or str(error)
        raise refusal_of(
            CODES, _reason(error), text, status=status, pool=pool, zone=zone
        ) from error
    except GoogleAuthError as error:
        # No answer, for example of the machine's metadata, is no refusal.
        silent = error.retryable or isinstance(error.__cause__ or error, TransportError)
        kind = CloudUnavailable if silent else CloudDenied
        raise kind(f"Google's credentials: {error}") from error
    except (GoogleAPIError, OSError) as error:
        # Errors of requests are OSErrors.
        raise CloudUnavailable(f"Compute Engine: {error}") from error
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"invalid request to Compute Engine: {error}") from error


def _reason(error: GoogleAPICallError) -> str:
    """Return the most specific name of a refusal, or its HTTP status."""
    for row in error.errors:
        if isinstance(row, dict) and row.get("reason"):
            return str(row["reason"])
    return str(error.reason or error.code)


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
    return {"service_accounts": [{"email": spec.template.service_account, "scopes": [_SCOPE]}]}


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


#: Permissions of a launch; docs/security.md lists all that the controller needs.
PERMISSIONS = ("compute.instances.create", "compute.instanceTemplates.useReadOnly")
RESOURCE_MANAGER = "https://cloudresourcemanager.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


def ask_google(pool: GcpPoolSpec, cpus: Mapping[str, float], url: str | None) -> AccountAnswer:
    """Return what the project allows. ``cpus``: vCPUs of known types. Raises
    :class:`~vcasgd.errors.FleetError`.

    ``url`` replaces Google's own, as for :class:`~vcasgd.fleet.providers.gcp.GcpProvider`.
    """
    missing = sorted(set(PERMISSIONS) - _granted(pool, url))
    return AccountAnswer(", ".join(missing) or None, tuple(_quotas(pool, cpus, url)))


def _granted(pool: GcpPoolSpec, url: str | None) -> set[str]:
    address = f"{url or RESOURCE_MANAGER}/v1/projects/{pool.template.project}:testIamPermissions"

    def ask() -> Any:
        with session(url) as http:
            body = {"permissions": list(PERMISSIONS)}
            answer = http.post(address, json=body, timeout=CALL_SECONDS)
            answer.raise_for_status()
            return answer.json()

    return set(attempt(ask, pool.name).get("permissions", ()))


def session(url: str | None) -> AuthorizedSession:
    """Return a session with this process's credentials, or without any over plain HTTP."""
    return AuthorizedSession(_credentials(url))


def _quotas(pool: GcpPoolSpec, cpus: Mapping[str, float], url: str | None) -> list[AccountQuota]:
    project = pool.template.project
    try:
        regions = attempt(lambda: compute_v1.RegionsClient(**client_options(url)))
        region = call(regions.get, {"project": project, "region": pool.region}, pool.name)
    except CloudDenied:
        return []  # Launches don't need the permission to read quotas.
    rows = {row.metric: row for row in region.quotas}
    # Without a quota of their own, spot machines count against that of the others.
    names = ("PREEMPTIBLE_CPUS", "CPUS") if pool.spot else ("CPUS",)
    known = [rows[name] for name in names if name in rows]
    found = next((row for row in known if row.limit > 0), known[0] if known else None)
    if found is None or not cpus:
        return []
    remedy = (
        f"request a higher {found.metric} for {pool.region} under IAM & Admin > Quotas of the "
        f"project {project}"
    )
    name = f"{found.metric} of {pool.region}"
    return [AccountQuota(name, found.limit, min(cpus.values()), found.usage, remedy)]
