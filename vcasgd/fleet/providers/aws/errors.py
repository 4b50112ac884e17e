"""Errors of EC2 and botocore as those of the fleet.

Codes: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html. ``CreateFleet``
also responds with status 200 that contains codes of single launches.
"""

from __future__ import annotations

from collections.abc import Iterable

from botocore import exceptions as botocore

from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    InvalidRequest,
    NoCapacity,
    QuotaExceeded,
    Throttled,
)
from vcasgd.fleet.providers.errors import fleet_error, kind_of

#: Patterns of EC2's codes.
CODES: dict[type[FleetError], str] = {
    Throttled: "Thrott|^RequestLimit|TooManyRequests|^PriorRequest|^Bandwidth|^SlowDown",
    NoCapacity: "^Insufficient|CapacityExceeded|^SpotMaxPriceTooLow|^Unfulfillable"
    "|^Unsupported(InstanceTypeOnHost)?$",
    QuotaExceeded: "(Limit|Count|Quota)Exceeded",
    CloudDenied: "AuthFailure|Unauthorized|AccessDenied|Expired|ClientTokenId|Signature|AccessKey"
    "|AuthenticationToken|OptInRequired|PendingVerification|UnrecognizedClient|^Blocked"
    "|OperationNotPermitted|AuthorizationHeader",
    CloudUnavailable: "Internal(Error|Failure|Exception|$)|Unavailable|RequestTimeout|Busy"
    "|Concurrent",
}
#: botocore's exceptions without an answer of EC2. After others, the request may have been sent.
_DENIED = (
    botocore.NoCredentialsError,
    botocore.NoAuthTokenError,
    botocore.PartialCredentialsError,
    botocore.CredentialRetrievalError,
    botocore.UnknownCredentialError,
    botocore.TokenRetrievalError,
    botocore.SSOError,
)
_INVALID = (
    botocore.ParamValidationError,
    botocore.ValidationError,
    botocore.NoRegionError,
    botocore.InvalidRegionError,
    botocore.UnknownServiceError,
    botocore.ProfileNotFound,
    botocore.ConfigParseError,
    botocore.ConfigNotFound,
)
#: Order in which one of several refusals is reported: those that a person must fix come first.
_ORDER = (CloudDenied, InvalidRequest, QuotaExceeded, Throttled, CloudUnavailable, NoCapacity)


def error_of(
    code: str,
    message: str,
    *,
    status: int = 400,
    pool: str | None = None,
    zone: str | None = None,
) -> FleetError:
    """Convert an error of EC2. The message contains the code."""
    kind = kind_of(code, CODES, status)
    return fleet_error(kind, f"{code}: {message}", code=code, pool=pool, zone=zone)


def error_without_answer(error: botocore.BotoCoreError, what: str, pool: str | None) -> FleetError:
    """Convert an exception of botocore that isn't an answer of EC2."""
    kind: type[FleetError] = CloudUnavailable
    if isinstance(error, _DENIED):
        kind = CloudDenied
    elif isinstance(error, _INVALID):
        kind = InvalidRequest
    return fleet_error(kind, f"{what}: {error}", pool=pool)


def worst(errors: Iterable[FleetError]) -> FleetError | None:
    """Return the error to report, or None without any."""
    return min(errors, key=lambda error: _ORDER.index(type(error)), default=None)
