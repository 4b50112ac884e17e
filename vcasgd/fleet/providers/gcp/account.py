"""Permission of these credentials to launch machines of a pool."""

from __future__ import annotations

from typing import Any

from google.auth import default
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.requests import AuthorizedSession

from vcasgd.fleet.pools import GcpPoolSpec
from vcasgd.fleet.providers.gcp.provider import CALL_SECONDS, attempt

#: Permissions of a launch; docs/security.md lists all that the controller needs.
PERMISSIONS = ("compute.instances.create", "compute.instanceTemplates.useReadOnly")
RESOURCE_MANAGER = "https://cloudresourcemanager.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


def missing_permission(pool: GcpPoolSpec, url: str | None) -> str | None:
    """Return which permissions are missing, or None. Raises :class:`~vcasgd.errors.FleetError`.

    ``url`` replaces Google's own, as for :class:`~vcasgd.fleet.providers.gcp.provider.GcpProvider`.
    """
    address = f"{url or RESOURCE_MANAGER}/v1/projects/{pool.template.project}:testIamPermissions"

    def ask() -> Any:
        with _session(url) as session:
            body = {"permissions": list(PERMISSIONS)}
            answer = session.post(address, json=body, timeout=CALL_SECONDS)
            answer.raise_for_status()
            return answer.json()

    granted = set(attempt(ask, pool.name).get("permissions", ()))
    return ", ".join(sorted(set(PERMISSIONS) - granted)) or None


def _session(url: str | None) -> AuthorizedSession:
    if url is not None and url.startswith("http://"):
        return AuthorizedSession(AnonymousCredentials())
    credentials, _ = default(scopes=[_SCOPE])
    return AuthorizedSession(credentials)
