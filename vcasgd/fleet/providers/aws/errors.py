"""Mapping of EC2's errors to those of the fleet.

Codes: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html, limited to the
calls of :mod:`~vcasgd.fleet.providers.aws.provider`. ``CreateFleet`` also responds with status 200
that contains codes of single launches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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
        InsufficientInstanceCapacity InsufficientHostCapacity InsufficientCapacityOnHost
        InsufficientReservedInstanceCapacity InsufficientAddressCapacity InsufficientVolumeCapacity
        InsufficientFreeAddressesInSubnet InsufficientInterfaceCapacity ReservationCapacityExceeded
        SpotMaxPriceTooLow UnfulfillableCapacity Unsupported UnsupportedInstanceTypeOnHost""",
    QuotaExceeded: """
        InstanceLimitExceeded VcpuLimitExceeded MaxSpotInstanceCountExceeded VolumeLimitExceeded
        MaxSpotFleetRequestCountExceeded MaxIOPSLimitExceeded ResourceCountExceeded
        ServiceQuotaExceededException LimitExceededException""",
    CloudDenied: """
        AuthFailure UnauthorizedOperation AccessDenied AccessDeniedException Blocked
        InvalidClientTokenId SignatureDoesNotMatch ExpiredToken ExpiredTokenException RequestExpired
        InvalidAccessKeyId MissingAuthenticationToken OptInRequired PendingVerification
        UnrecognizedClientException IncompleteSignature OperationNotPermitted
        AuthorizationHeaderMalformed""",
    Throttled: """
        RequestLimitExceeded Throttling ThrottlingException ThrottledException EC2ThrottledException
        TooManyRequestsException RequestThrottled RequestThrottledException
        PriorRequestNotComplete BandwidthLimitExceeded SlowDown""",
    InvalidRequest: """
        DryRunOperation FilterLimitExceeded IdempotentInstanceTerminated IdempotentParameterMismatch
        IncorrectInstanceState IncorrectState IncorrectSpotRequestState MalformedQueryString
        SpotInstanceTypeNotSupported LaunchTemplateVersionLimitExceeded NonEBSInstance
        UnknownParameter UnknownVolumeType UnknownPrincipalType.Unsupported ValidationError
        VPCIdNotSpecified VPCResourceNotSpecified EncryptedVolumesNotSupported TagPolicyViolation
        NoSuchVersion TagLimitExceeded SecurityGroupsPerInstanceLimitExceeded
        SecurityGroupsPerInterfaceLimitExceeded AttachmentLimitExceeded
        OperationNotSupportedException""",
    CloudUnavailable: """
        InternalError InternalFailure InternalException ServerInternal ServiceUnavailable
        ServiceUnavailableException Unavailable RequestTimeout RequestTimeoutException
        ResourceBusy ConcurrentTagAccess RequestResourceCountExceeded""",
}
#: Patterns for codes that the table lacks.
_FORMS: tuple[tuple[str, type[FleetError]], ...] = (
    (r"Insufficient.*Capacity", NoCapacity),
    (r".*(LimitExceeded|QuotaExceeded)", QuotaExceeded),
    (r"(Invalid|Missing|Unsupported)\w*(\..*)?", InvalidRequest),
    (r".*(Already\w+|InUse|DoesNotExist|NotSupported|NotAttached)\w*", InvalidRequest),
    (r"(Duplicate|Dependency).*", InvalidRequest),
    (r".*\.(NotFound|Malformed|Duplicate|InUse|NotFoundException)", InvalidRequest),
)

#: Error class for each code of EC2.
CODES: dict[str, type[FleetError]] = {
    code: kind for kind, codes in _CODES.items() for code in codes.split()
}

#: Exceptions of botocore, by the name of the class or of a base class.
_EXCEPTIONS: dict[type[FleetError], str] = {
    CloudUnavailable: """
        HTTPClientError ConnectionError ChecksumError IncompleteReadError UnseekableStreamError
        ResponseStreamingError CapacityNotAvailableError MetadataRetrievalError WaiterError
        PaginationError FlexibleChecksumError AwsChunkedWrapperError EventStreamError""",
    CloudDenied: """
        NoCredentialsError NoAuthTokenError TokenRetrievalError UnknownTokenProviderError
        PartialCredentialsError CredentialRetrievalError UnknownCredentialError SSOError LoginError
        RefreshWithMFAUnsupportedError InfiniteLoopConfigError UnknownSignatureVersionError
        UnsupportedSignatureVersionError""",
    InvalidRequest: """
        DataNotFoundError UnknownRegionError ApiVersionNotFoundError InvalidIMDSEndpointError
        InvalidIMDSEndpointModeError ServiceNotInRegionError BaseEndpointResolverError
        ProfileNotFound ConfigParseError ConfigNotFound MissingParametersError ValidationError
        ParamValidationError InvalidRegionError AliasConflictParameterError UnknownServiceStyle
        OperationNotPageableError InvalidExpressionError WaiterConfigError
        UnknownClientMethodError InvalidDNSNameError InvalidS3AddressingStyleError
        UnsupportedS3ArnError UnsupportedS3ControlArnError InvalidHostLabelError
        UnsupportedOutpostResourceError UnsupportedS3ConfigurationError
        UnsupportedS3AccesspointConfigurationError InvalidEndpointDiscoveryConfigurationError
        UnsupportedS3ControlConfigurationError InvalidRetryConfigurationError
        InvalidMaxRetryAttemptsError InvalidRetryModeError
        InvalidS3UsEast1RegionalEndpointConfigError InvalidSTSRegionalEndpointsConfigError
        StubResponseError InvalidConfigError MD5UnavailableError MissingDependencyException
        UndefinedModelAttributeError MissingServiceIdError InvalidProxiesConfigError
        InvalidDefaultsMode InvalidEndpointConfigurationError EndpointProviderError
        UnknownEndpointResolutionBuiltInName InvalidChecksumConfigError
        UnsupportedServiceProtocolsError""",
}

#: Error class for each exception of botocore.
EXCEPTIONS: dict[str, type[FleetError]] = {
    name: kind for kind, names in _EXCEPTIONS.items() for name in names.split()
}

_REMEDIES: dict[type[FleetError], str] = {
    QuotaExceeded: "request a higher quota (Service Quotas), or set the pool's max_instances",
    CloudDenied: "docs/security.md lists the permissions that the controller needs",
    InvalidRequest: "check the pool's template, zones, and instance types",
}
#: Order in which one of several refusals is reported: those that a person must fix come first.
_ORDER = (
    CloudDenied,
    InvalidRequest,
    QuotaExceeded,
    FleetError,
    Throttled,
    CloudUnavailable,
    NoCapacity,
)


def kind_of(code: str, status: int = 400) -> type[FleetError]:
    """Return the error class for a code. The HTTP status decides for an unknown one."""
    if code in CODES:
        return CODES[code]
    matching = next((kind for form, kind in _FORMS if re.fullmatch(form, code)), None)
    return matching or (CloudUnavailable if status >= 500 else FleetError)


def kind_of_exception(error: Exception) -> type[FleetError]:
    """Return the error class for an exception of botocore that isn't a response of EC2."""
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((EXCEPTIONS[name] for name in names if name in EXCEPTIONS), FleetError)


def error_of(
    code: str,
    message: str,
    *,
    status: int = 400,
    pool: str | None = None,
    zone: str | None = None,
) -> FleetError:
    """Convert an error of EC2. The message contains the code."""
    kind = kind_of(code, status)
    where = f"{pool}: " if pool else ""
    return kind(
        f"{where}{code}: {message}",
        remedy=_REMEDIES.get(kind),
        code=code,
        **({"pool": pool} if pool else {}),
        **({"zone": zone} if zone else {}),
    )


def worst(errors: Iterable[FleetError]) -> FleetError | None:
    """Return the error to report, or None without any."""
    return min(errors, key=lambda error: _ORDER.index(type(error)), default=None)
