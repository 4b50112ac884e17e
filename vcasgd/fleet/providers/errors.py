"""Errors of the fleet from the codes and messages of clouds."""

from __future__ import annotations

import re
from collections.abc import Mapping

from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    InvalidRequest,
    QuotaExceeded,
    Throttled,
)

#: Patterns of codes or messages, without regard to case; the first that matches counts.
Patterns = Mapping[type[FleetError], str]

_REMEDIES: Mapping[type[FleetError], str] = {
    QuotaExceeded: "request a higher quota from the cloud, or set the pool's max_machines",
    CloudDenied: "docs/security.md lists the permissions that the controller needs",
    InvalidRequest: "check the pool's template, zones, and machine types",
}


def kind_of(text: str, patterns: Patterns, status: int | None = None) -> type[FleetError]:
    """Return the error class for a code or message. The HTTP status decides for an unknown one.

    Without a status, the request may have been completed, so the cloud counts as unavailable.
    """
    for kind, pattern in patterns.items():
        if re.search(pattern, text, re.IGNORECASE):
            return kind
    if status is None or status >= 499 or status == 408:
        return CloudUnavailable
    if status in (401, 403):
        return CloudDenied
    return Throttled if status == 429 else InvalidRequest


def fleet_error(
    kind: type[FleetError],
    message: str,
    *,
    remedies: Mapping[type[FleetError], str] = _REMEDIES,
    pool: str | None = None,
    zone: str | None = None,
    code: str | None = None,
    status: int | None = None,
) -> FleetError:
    """Return an error whose message begins with the pool and the zone, if they are known."""
    where = "".join(f"{part}: " for part in (pool, zone) if part)
    details = {"pool": pool, "zone": zone, "code": code, "status": status}
    known = {name: value for name, value in details.items() if value is not None}
    return kind(f"{where}{message}", remedy=remedies.get(kind), **known)
