"""Limits of a Google Cloud project for a pool: permissions of the caller, and quotas of vCPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.auth import default
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.requests import AuthorizedSession
from google.cloud import compute_v1

from vcasgd.errors import CloudDenied
from vcasgd.fleet.pools import GcpPoolSpec
from vcasgd.fleet.providers.base import AccountAnswer, AccountQuota
from vcasgd.fleet.providers.gcp.provider import CALL_SECONDS, attempt, call, client_options

#: Permissions of a launch; docs/security.md lists all that the controller needs.
PERMISSIONS = ("compute.instances.create", "compute.instanceTemplates.useReadOnly")
RESOURCE_MANAGER = "https://cloudresourcemanager.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


def ask_google(pool: GcpPoolSpec, cpus: Mapping[str, float], url: str | None) -> AccountAnswer:
    """Return what the project allows. ``cpus``: vCPUs of known types. Raises
    :class:`~vcasgd.errors.FleetError`.

    ``url`` replaces Google's own, as for :class:`~vcasgd.fleet.providers.gcp.provider.GcpProvider`.
    """
    missing = sorted(set(PERMISSIONS) - _granted(pool, url))
    return AccountAnswer(", ".join(missing) or None, tuple(_quotas(pool, cpus, url)))


def _granted(pool: GcpPoolSpec, url: str | None) -> set[str]:
    address = f"{url or RESOURCE_MANAGER}/v1/projects/{pool.template.project}:testIamPermissions"

    def ask() -> Any:
        with _session(url) as session:
            body = {"permissions": list(PERMISSIONS)}
            answer = session.post(address, json=body, timeout=CALL_SECONDS)
            answer.raise_for_status()
            return answer.json()

    return set(attempt(ask, pool.name).get("permissions", ()))


def _session(url: str | None) -> AuthorizedSession:
    if url is not None and url.startswith("http://"):
        return AuthorizedSession(AnonymousCredentials())
    credentials, _ = default(scopes=[_SCOPE])
    return AuthorizedSession(credentials)


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
