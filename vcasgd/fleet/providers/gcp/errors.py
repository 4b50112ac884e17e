"""Errors of Compute Engine as those of the fleet.

Codes of operations: https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-vm-creation
and https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-resource-availability;
reasons and states of requests: https://cloud.google.com/apis/design/errors.
"""

from __future__ import annotations

from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    NoCapacity,
    QuotaExceeded,
    Throttled,
)
from vcasgd.fleet.providers.errors import fleet_error, kind_of

#: Patterns of the codes of an operation, and of the reasons and states of a refused request.
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


def error_of(
    code: str,
    message: str,
    *,
    status: int = 400,
    pool: str | None = None,
    zone: str | None = None,
) -> FleetError:
    """Convert an error of Google. The message contains the code."""
    kind = kind_of(code, CODES, status)
    text = f"{code}: {message}"
    return fleet_error(kind, text, code=code, status=status, pool=pool, zone=zone)
