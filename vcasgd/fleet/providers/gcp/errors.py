"""Mapping of Compute Engine's errors to those of the fleet.

Codes of operations: https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-vm-creation
and https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-resource-availability;
reasons and states of requests: https://cloud.google.com/apis/design/errors.
"""

from __future__ import annotations

import re

from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    InvalidRequest,
    NoCapacity,
    QuotaExceeded,
    Throttled,
)

_CODES: dict[type[FleetError], str] = {
    NoCapacity: """
        ZONE_RESOURCE_POOL_EXHAUSTED ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS STOCKOUT
        RESOURCE_POOL_EXHAUSTED RESOURCE_POOL_EXHAUSTED_WITH_DETAILS VM_MIN_COUNT_NOT_REACHED
        REGION_RESOURCE_POOL_EXHAUSTED CAPACITY_NOT_AVAILABLE IP_SPACE_EXHAUSTED
        IP_SPACE_EXHAUSTED_WITH_DETAILS UNSUPPORTED_OPERATION_IN_ZONE""",
    QuotaExceeded: """
        QUOTA_EXCEEDED quotaExceeded limitExceeded LIMIT_EXCEEDED dailyLimitExceeded
        billingNotEnabled QUOTA_FOR_INSTANCES""",
    CloudDenied: """
        PERMISSION_DENIED PERMISSIONS_ERROR UNAUTHENTICATED forbidden accessNotConfigured
        SERVICE_DISABLED authError required insufficientPermissions CONSUMER_INVALID
        SERVICE_ACCOUNT_ACCESS_DENIED IAM_PERMISSION_DENIED BILLING_DISABLED accountDisabled
        POLICY_VIOLATION CONDITION_NOT_MET conditionNotMet orgPolicy""",
    Throttled: """
        RATE_LIMIT_EXCEEDED rateLimitExceeded userRateLimitExceeded RESOURCE_EXHAUSTED
        RESOURCE_OPERATION_RATE_EXCEEDED operationRateExceeded""",
    InvalidRequest: """
        INVALID_ARGUMENT INVALID_USAGE INVALID_FIELD_VALUE invalid badRequest invalidParameter
        invalidQuery notFound RESOURCE_NOT_FOUND NOT_FOUND RESOURCE_NOT_READY resourceNotReady
        RESOURCE_IN_USE_BY_ANOTHER_RESOURCE resourceInUseByAnotherResource alreadyExists
        RESOURCE_ALREADY_EXISTS ALREADY_EXISTS FAILED_PRECONDITION OUT_OF_RANGE UNIMPLEMENTED
        UNSUPPORTED_OPERATION methodNotAllowed NOT_IMPLEMENTED httpMethodNotAllowed
        INVALID_MACHINE_TYPE MACHINE_TYPE_NOT_FOUND wrongUrlForTheResource duplicate""",
    CloudUnavailable: """
        INTERNAL INTERNAL_ERROR internalError backendError UNAVAILABLE SERVICE_UNAVAILABLE ABORTED
        CANCELLED UNKNOWN DATA_LOSS DEADLINE_EXCEEDED serverError RESOURCE_OPERATION_TIMEOUT
        TIMEOUT OPERATION_CANCELED_BY_USER RESOURCE_STATE_CHANGED""",
}

#: Error class for each code of an operation, and reason or state of a refused request.
CODES: dict[str, type[FleetError]] = {
    code: kind for kind, codes in _CODES.items() for code in codes.split()
}
_STATUSES: dict[int, type[FleetError]] = {
    400: InvalidRequest,
    401: CloudDenied,
    403: CloudDenied,
    404: InvalidRequest,
    405: InvalidRequest,
    408: CloudUnavailable,
    409: InvalidRequest,
    410: InvalidRequest,
    411: InvalidRequest,
    412: InvalidRequest,
    413: InvalidRequest,
    416: InvalidRequest,
    429: Throttled,
    499: CloudUnavailable,
}
_REMEDIES: dict[type[FleetError], str] = {
    QuotaExceeded: "request a higher quota from Google, or set the pool's max_instances",
    CloudDenied: "docs/security.md lists the permissions that the controller needs",
    InvalidRequest: "check the pool's template, zones, and instance types",
}


def kind_of(code: str, status: int | None = None) -> type[FleetError]:
    """Return the error class for a code. The HTTP status decides for an unknown one."""
    if code in CODES:
        return CODES[code]
    if re.search(r"EXHAUSTED|STOCKOUT", code):
        return NoCapacity
    if status is not None and status >= 500:
        return CloudUnavailable
    return _STATUSES.get(status or 0, FleetError)


def error_of(
    code: str,
    message: str,
    *,
    status: int | None = None,
    pool: str | None = None,
    zone: str | None = None,
) -> FleetError:
    """Convert an error of Google. The message contains the code."""
    kind = kind_of(code, status)
    where = "".join(f"{part}: " for part in (pool, zone) if part)
    return kind(
        f"{where}{code}: {message}",
        remedy=_REMEDIES.get(kind),
        code=code,
        status=status,
        **({"pool": pool} if pool else {}),
        **({"zone": zone} if zone else {}),
    )
