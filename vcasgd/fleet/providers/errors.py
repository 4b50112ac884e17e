"""Errors of the fleet from the codes and messages of clouds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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


def refusal_of(
    patterns: Patterns,
    code: str,
    message: str,
    *,
    status: int = 400,
    pool: str | None = None,
    zone: str | None = None,
) -> FleetError:
    """Convert a refusal of a cloud. The message contains the code."""
    kind, text = kind_of(code, patterns, status), f"{code}: {message}"
    return fleet_error(kind, text, pool=pool, zone=zone, code=code, status=status)


def fleet_error(
    kind: type[FleetError],
    message: str,
    *,
    remedies: Mapping[type[FleetError], str] = _REMEDIES,
    pool: str | None = None,
    zone: str | None = None,
    **details: Any,
) -> FleetError:
    """Return an error whose message begins with the pool and the zone, if they are known."""
    where = "".join(f"{part}: " for part in (pool, zone) if part)
    known = {"pool": pool, "zone": zone, **details}
    known = {name: value for name, value in known.items() if value is not None}
    return kind(f"{where}{message}", remedy=remedies.get(kind), **known)
