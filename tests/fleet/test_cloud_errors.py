"""Every error of a cloud and of its library maps to an error of the fleet."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from types import ModuleType
from typing import Any

import botocore.exceptions
import google.api_core.exceptions
import google.auth.exceptions
import pytest
import requests
from support.provider_backends import AwsBackend, GcpBackend, aws_backend, sleeper

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
from vcasgd.fleet.prices import PriceTable
from vcasgd.fleet.providers import aws_calls
from vcasgd.fleet.providers.base import refusal_of
from vcasgd.schemas.fleet import MachineState

#: Codes in EC2's reference for these calls, and Spot's codes for a failed fleet.
EC2_CODES = {
    NoCapacity: "InsufficientInstanceCapacity InsufficientHostCapacity UnfulfillableCapacity "
    "SpotMaxPriceTooLow Unsupported InsufficientFreeAddressesInSubnet",
    QuotaExceeded: "InstanceLimitExceeded VcpuLimitExceeded MaxSpotInstanceCountExceeded "
    "VolumeLimitExceeded NetworkInterfaceLimitExceeded AddressLimitExceeded",
    CloudDenied: "UnauthorizedOperation AuthFailure OptInRequired PendingVerification Blocked "
    "RequestExpired InvalidClientTokenId MissingAuthenticationToken IncompleteSignature "
    "ExpiredToken SignatureDoesNotMatch AccessDenied",
    Throttled: "RequestLimitExceeded Throttling EC2ThrottledException BandwidthLimitExceeded",
    InvalidRequest: "InvalidAMIID.NotFound InvalidAMIID.Malformed InvalidSubnetID.NotFound "
    "InvalidLaunchTemplateId.NotFound InvalidLaunchTemplateName.NotFoundException "
    "InvalidParameterValue InvalidParameterCombination MissingParameter UnknownParameter "
    "InvalidInstanceID.NotFound InvalidInstanceID.Malformed IncorrectInstanceState DryRunOperation "
    "IdempotentParameterMismatch InvalidGroup.NotFound InvalidKeyPair.NotFound "
    "InvalidUserData.Malformed "
    "UnsupportedOperation MalformedQueryString ValidationError InvalidPaginationToken "
    "InvalidFleetConfig SpotInstanceTypeNotSupported InvalidIamInstanceProfileArn.Malformed",
    CloudUnavailable: "InternalError InternalFailure ServiceUnavailable Unavailable "
    "ServerInternal RequestTimeout",
}
COMPUTE_CODES = {
    NoCapacity: "ZONE_RESOURCE_POOL_EXHAUSTED ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS STOCKOUT "
    "RESOURCE_POOL_EXHAUSTED IP_SPACE_EXHAUSTED REGION_RESOURCE_POOL_EXHAUSTED_WITH_SOMETHING_NEW",
    QuotaExceeded: "QUOTA_EXCEEDED quotaExceeded limitExceeded",
    CloudDenied: "forbidden PERMISSION_DENIED UNAUTHENTICATED accessNotConfigured authError "
    "required CONDITION_NOT_MET",
    Throttled: "rateLimitExceeded userRateLimitExceeded RATE_LIMIT_EXCEEDED RESOURCE_EXHAUSTED "
    "RESOURCE_OPERATION_RATE_EXCEEDED",
    InvalidRequest: "invalid badRequest notFound RESOURCE_NOT_FOUND alreadyExists INVALID_USAGE "
    "INVALID_FIELD_VALUE UNSUPPORTED_OPERATION resourceInUseByAnotherResource INVALID_ARGUMENT",
    CloudUnavailable: "backendError internalError INTERNAL_ERROR UNAVAILABLE DEADLINE_EXCEEDED",
}
BOOT = sleeper()


def rows(table: dict[type[FleetError], str]) -> list[tuple[str, type[FleetError]]]:
    return [(code, kind) for kind, codes in table.items() for code in codes.split()]


def family(kind: type) -> Iterator[type]:
    for sub in kind.__subclasses__():
        yield sub
        yield from family(sub)


@pytest.fixture(scope="module")
def gcp_calls() -> ModuleType:
    """Return a module whose import takes seconds, so tests of other files don't need it."""
    return importlib.import_module("vcasgd.fleet.providers.gcp_calls")


@pytest.mark.parametrize(("code", "kind"), rows(EC2_CODES))
def test_a_code_of_ec2(code: str, kind: type[FleetError]) -> None:
    error = refusal_of(aws_calls.CODES, code, "no", pool="p", zone="z")
    assert type(error) is kind
    assert error.code == code
    assert error.message == f"p: z: {code}: no"


@pytest.mark.parametrize(("code", "kind"), rows(COMPUTE_CODES))
def test_a_code_of_compute_engine(gcp_calls: ModuleType, code: str, kind: type[FleetError]) -> None:
    assert type(refusal_of(gcp_calls.CODES, code, "no")) is kind


def test_unknown_code_blames_the_cloud_only_if_the_cloud_does(gcp_calls: ModuleType) -> None:
    for status, kind in ((418, InvalidRequest), (500, CloudUnavailable)):
        for codes in (aws_calls.CODES, gcp_calls.CODES):
            assert type(refusal_of(codes, "Teapot", "short and stout", status=status)) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (botocore.exceptions.NoCredentialsError(), CloudDenied),
        (botocore.exceptions.UnauthorizedSSOTokenError(), CloudDenied),
        (botocore.exceptions.ParamValidationError(report="x"), InvalidRequest),
        (botocore.exceptions.EndpointConnectionError(endpoint_url="x"), CloudUnavailable),
        (botocore.exceptions.ConnectionClosedError(endpoint_url="x"), CloudUnavailable),
        (botocore.exceptions.ReadTimeoutError(endpoint_url="x"), CloudUnavailable),
    ],
)
def test_a_request_without_an_answer_may_have_been_completed(
    error: botocore.exceptions.BotoCoreError, kind: type[FleetError]
) -> None:
    with pytest.raises(FleetError) as caught, aws_calls.errors("create_fleet", "p"):
        raise error
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    "kind",
    [
        *family(google.api_core.exceptions.GoogleAPIError),
        *family(google.auth.exceptions.GoogleAuthError),
        *family(requests.exceptions.RequestException),
        TimeoutError,
        ConnectionResetError,
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_exception_of_google_s_libraries_is_mapped(
    gcp_calls: ModuleType, kind: type[Exception]
) -> None:
    more = {"RetryError": (None,), "JSONDecodeError": ("", 0)}
    own = kind.__module__.startswith("google") or kind.__name__ == "JSONDecodeError"
    error = kind("no", *(more.get(kind.__name__, ()) if own else ()))

    def fail() -> None:
        raise error

    with pytest.raises(FleetError):
        gcp_calls.attempt(fail, "pool")


def test_credentials_that_can_not_be_read_now_are_no_refusal(gcp_calls: ModuleType) -> None:
    silent = google.auth.exceptions.TransportError("metadata")

    def refresh() -> None:
        raise google.auth.exceptions.RefreshError("no token") from silent

    with pytest.raises(CloudUnavailable):
        gcp_calls.attempt(refresh)


# --- over HTTP --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def aws() -> Iterator[AwsBackend]:
    with aws_backend() as backend:
        yield backend


@pytest.mark.parametrize("price", ["nan", "inf", "-1", "0", "1e9"])
def test_what_is_no_price_counts_as_none(
    aws: AwsBackend, monkeypatch: pytest.MonkeyPatch, price: str
) -> None:
    first, second = aws.zones
    prices = {(aws.kind, first): float(price), (aws.kind, second): 0.05}
    monkeypatch.setattr(aws.ec2, "prices", prices)
    (spot,) = aws.provider().offers(aws.pool)
    assert (spot.zone, spot.price_per_hour) == (second, 0.05)

    monkeypatch.setattr(aws.ec2, "price_list", {aws.kind: float(price)})
    offers = aws.provider(spot=False).offers(aws.pool)
    usual = PriceTable.load("aws").price("us-east-1", aws.kind).on_demand
    assert {one.price_per_hour for one in offers if one.machine_type == aws.kind} == {usual}


@pytest.mark.parametrize("allowed", [True, False])
def test_prices_on_demand_are_those_of_the_price_list_if_it_may_be_read(
    aws: AwsBackend, allowed: bool
) -> None:
    aws.ec2.price_list = {aws.kind: 0.1234} if allowed else None

    provider = aws.provider(spot=False)
    offers = {offer.machine_type: offer for offer in provider.offers(aws.pool)}

    table = PriceTable.load("aws")
    listed, other = offers[aws.kind], offers["m5.large"]
    usual = table.price("us-east-1", aws.kind)
    assert listed.price_per_hour == (0.1234 if allowed else usual.on_demand)
    assert listed.source.startswith("price list of AWS" if allowed else usual.source)
    assert other.source == table.price("us-east-1", "m5.large").source


@pytest.mark.parametrize(
    ("action", "code", "status", "kind"),
    [
        ("CreateFleet", "UnauthorizedOperation", 403, CloudDenied),
        ("CreateFleet", "InvalidLaunchTemplateId.NotFound", 400, InvalidRequest),
        ("CreateFleet", "MaxSpotInstanceCountExceeded", 400, QuotaExceeded),
        ("DescribeInstances", "RequestLimitExceeded", 503, Throttled),
        ("DescribeInstances", "InternalError", 500, CloudUnavailable),
        ("DescribeInstances", "NewInThisYear", 502, CloudUnavailable),
    ],
)
def test_ec2_refuses(
    aws: AwsBackend, action: str, code: str, status: int, kind: type[FleetError]
) -> None:
    provider = aws.provider()
    for _ in range(2):  # The library retries some of them.
        aws.ec2.refuse(action, code, status)
    launch = partial(provider.launch, aws.pool, 1, BOOT, "t1")
    with pytest.raises(FleetError) as caught:
        (launch if action == "CreateFleet" else provider.machines)()
    aws.ec2.refusals.clear()
    assert type(caught.value) is kind
    assert caught.value.code == code
    assert aws.alive() == set()


def test_refusal_that_needs_a_person_takes_precedence(aws: AwsBackend) -> None:
    aws.exhaust(*aws.zones)
    aws.ec2.exhausted[min(aws.ec2.exhausted)] = "VcpuLimitExceeded"
    with pytest.raises(QuotaExceeded):
        aws.provider().launch(aws.pool, 1, BOOT, "t1")
    aws.ec2.exhausted.clear()


def test_launch_with_a_lost_response_is_found_again(aws: AwsBackend) -> None:
    """EC2 has the token, with other parameters."""
    provider = aws.provider()
    granted = provider.launch(aws.pool, 2, BOOT, "lost")
    hidden = provider._granted
    seen: list[Any] = []

    def after_a_moment(token: str) -> list[str]:
        seen.append(token)
        return hidden(token) if len(seen) > 2 else []

    provider._granted = after_a_moment
    aws.ec2.refuse("CreateFleet", "IdempotentParameterMismatch")
    assert provider.launch(aws.pool, 1, BOOT, "lost") == granted
    assert len(seen) == 3
    for id_ in granted:
        provider.terminate(id_)


def test_a_token_that_got_no_machine_is_given_up(
    aws: AwsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EC2 has it with other parameters, and would refuse it for a day."""
    monkeypatch.setattr("vcasgd.fleet.providers.aws.TAG_SECONDS", 0.1)
    aws.ec2.refuse("CreateFleet", "IdempotentParameterMismatch")
    # The next launch then has another token, unlike after CloudUnavailable.
    with pytest.raises(NoCapacity, match="got no machine"):
        aws.provider().launch(aws.pool, 1, BOOT, "used")


def test_a_list_of_machines_waits_for_no_prices(aws: AwsBackend) -> None:
    """It has the last known ones. Prices are asked for with the offers."""
    provider = aws.provider()
    (machine,) = provider.launch(aws.pool, 1, BOOT, "priced")
    (before,) = provider.machines()
    assert before.price_per_hour < before.on_demand_price_per_hour
    for _ in range(aws_calls.ATTEMPTS):
        aws.ec2.refuse("DescribeSpotPriceHistory", "RequestLimitExceeded", 503)
    with pytest.raises(Throttled):
        provider.offers(aws.pool)

    # While EC2 tells none
    aws.ec2.calls.clear()
    assert [one.price_per_hour for one in provider.machines()] == [before.price_per_hour]
    assert aws.ec2.calls == ["DescribeInstances"]

    # When they change, and a type is no longer sold
    aws.ec2.prices |= {("m5.large", zone): 0.04 for zone in aws.zones}
    (other,) = provider.launch(aws.pool, 1, BOOT, "other", machine_types=["m5.large"])
    provider.offers(aws.pool)
    aws.ec2.prices = {(aws.kind, zone): 0.07 for zone in aws.zones}
    provider.offers(aws.pool)
    prices = {one.id: one.price_per_hour for one in provider.machines()}
    assert prices == {machine: 0.07, other: 0.04}
    provider.terminate(machine, other)


def test_a_protected_machine_keeps_no_other_one_alive(aws: AwsBackend) -> None:
    """EC2 refuses a call for many machines because of one that can't be ended."""
    provider = aws.provider()
    granted = provider.launch(aws.pool, 6, BOOT, "t1")
    aws.ec2.ec2().modify_instance_attribute(
        InstanceId=granted[2], DisableApiTermination={"Value": True}
    )
    with pytest.raises(CloudDenied, match="OperationNotPermitted"):
        provider.terminate(*granted, "i-0123456789abcdef0")
    assert aws.alive() == {granted[2]}

    # A refusal that concerns all machines is not repeated for each
    calls = aws.ec2.calls.count("TerminateInstances")
    aws.ec2.refuse("TerminateInstances", "UnauthorizedOperation", 403)
    with pytest.raises(CloudDenied, match="UnauthorizedOperation"):
        provider.terminate(*granted)
    assert aws.ec2.calls.count("TerminateInstances") == calls + 1


@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_zone_keeps_no_machine_of_another_one_alive(gcp: GcpBackend, silent: int) -> None:
    provider = gcp.provider()
    granted = [
        provider.launch(gcp.pool, 2, BOOT, f"in {zone}", zones=[zone]) for zone in gcp.zones[:2]
    ]
    zone = gcp.zones[silent]
    gcp.compute.refuse(f"{zone}/instances/", 503, "backendError")

    with pytest.raises(CloudUnavailable):
        provider.terminate(*granted[0], *granted[1])

    left = {one.id: one.zone for one in provider.machines() if one.state is MachineState.RUNNING}
    assert left == dict.fromkeys(granted[silent], zone)
    # It was asked once, because each request may take long.
    assert [path.split("/")[-3] for kind, path in gcp.compute.requests if kind == "DELETE"].count(
        zone
    ) == 1


@pytest.mark.parametrize(
    ("path", "reason", "status", "kind"),
    [
        ("bulkInsert", "forbidden", 403, CloudDenied),
        ("bulkInsert", "quotaExceeded", 403, QuotaExceeded),
        ("bulkInsert", "rateLimitExceeded", 403, Throttled),
        ("aggregated", "tooMany", 429, Throttled),
        ("aggregated", "backendError", 503, CloudUnavailable),
        ("instanceTemplates", "notFound", 404, InvalidRequest),
        ("bulkInsert", "invalid", 400, InvalidRequest),
    ],
)
def test_compute_engine_refuses(
    gcp: GcpBackend, path: str, reason: str, status: int, kind: type[FleetError]
) -> None:
    gcp.compute.refuse(path, status, reason)
    with pytest.raises(FleetError) as caught:
        gcp.provider().launch(gcp.pool, 1, BOOT, "t1")
    assert type(caught.value) is kind
    assert caught.value.code == reason
    assert not gcp.compute.refusals, "the refusal was used"
    assert gcp.alive() == set()


@pytest.mark.parametrize("code", ["STOCKOUT", "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"])
def test_operation_that_fails_for_capacity(gcp: GcpBackend, code: str) -> None:
    gcp.compute.exhausted = dict.fromkeys(gcp.zones, code)
    with pytest.raises(NoCapacity) as caught:
        gcp.provider().launch(gcp.pool, 1, BOOT, "t1")
    assert caught.value.code == code
    assert gcp.zones[-1] in caught.value.message
    # both zones, both types
    assert sum("bulkInsert" in path for _, path in gcp.compute.requests) == 4


def test_a_quota_ends_the_search(gcp: GcpBackend) -> None:
    gcp.compute.exhausted = {gcp.zones[0]: "QUOTA_EXCEEDED"}
    with pytest.raises(QuotaExceeded):
        gcp.provider().launch(gcp.pool, 1, BOOT, "t1")


def test_slow_operation_is_not_a_failure(gcp: GcpBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vcasgd.fleet.providers.gcp.LAUNCH_SECONDS", 0.5)
    gcp.compute.operation_seconds = 5.0
    granted = gcp.provider().launch(gcp.pool, 2, BOOT, "t1")
    assert set(granted) == gcp.alive()


def test_a_preemption_on_request(gcp: GcpBackend) -> None:
    provider = gcp.provider()
    (id_,) = provider.launch(gcp.pool, 1, BOOT, "t1")
    provider.evict(id_)
    (one,) = provider.machines()
    assert one.state.value == "leaving"
    (bought,) = provider.launch(gcp.pool, 1, BOOT, "t2", spot=False)
    with pytest.raises(FleetError, match="on-demand"):
        provider.evict(bought)


#: USD by what is priced in Google's catalog, as of November 2026: on demand, and spot.
RATES = {
    "N2 Instance Core": (0.031611, 0.007653),
    "N2 Instance Ram": (0.004237, 0.001026),
    "G2 Instance Core": (0.024988, 0.01),
    "G2 Instance Ram": (0.002927, 0.001),
    "Nvidia L4 GPU": (0.560004, 0.2),
}


def sku(what: str, usage: str, price: float, region: str = "us-central1") -> dict[str, Any]:
    """A row of the catalog, with an older price behind the newest one."""

    def priced(nanos: float) -> dict[str, Any]:
        unit = {"currencyCode": "USD", "units": "0", "nanos": round(nanos)}
        return {"pricingExpression": {"tieredRates": [{"unitPrice": unit}]}}

    return {
        "description": f"{what} running in Americas",
        "category": {"resourceFamily": "Compute", "usageType": usage},
        "serviceRegions": [region, "us-west1"],
        "pricingInfo": [priced(price * 1e9), priced(9e9)],
    }


def catalog() -> list[dict[str, Any]]:
    rows = [{"description": "no price", "category": {"usageType": "OnDemand"}, "pricingInfo": []}]
    for what, (on_demand, spot) in RATES.items():
        gpu = f"{what} attached to Spot Preemptible VMs"
        rows += [
            sku(what, "OnDemand", on_demand),
            sku(gpu if "GPU" in what else f"Spot Preemptible {what}", "Preemptible", spot),
            # Other prices of the same parts
            sku(f"Reserved {what}", "OnDemand", 7.0),
            sku(what, "Commit1Yr", 7.0),
            sku(what, "OnDemand", 7.0, "europe-west1"),
        ]
    return rows


@pytest.mark.parametrize("spot", [True, False])
@pytest.mark.parametrize("allowed", [True, False])
def test_prices_of_google_are_those_of_its_catalog_if_it_may_be_read(
    gcp: GcpBackend, spot: bool, allowed: bool
) -> None:
    gcp.compute.skus = catalog()
    if not allowed:
        gcp.compute.refuse("skus", 403, "SERVICE_DISABLED")
    kinds = ["n2-standard-4", "g2-standard-4", "e2-standard-2"]

    provider = gcp.provider(spot=spot, machine_types=kinds)
    offers = {offer.machine_type: offer for offer in provider.offers(gcp.pool)}

    usual = {kind: PriceTable.load("gcp").price("us-central1", kind) for kind in kinds}
    listed = {kind: each.spot if spot else each.on_demand for kind, each in usual.items()}
    if allowed:
        n2, g2 = (0.047028, 0.256) if spot else (0.194236, 0.706788)
        listed |= {"n2-standard-4": n2, "g2-standard-4": g2}
    assert {kind: offer.price_per_hour for kind, offer in offers.items()} == listed
    today = datetime.now(UTC).date()
    source = f"price catalog of Google ({today})" if allowed else usual["n2-standard-4"].source
    assert offers["n2-standard-4"].source == source
    assert offers["e2-standard-2"].source == usual["e2-standard-2"].source
    assert [path for _, path in gcp.compute.requests].count("/v1/services/6F81-5844-456A/skus") == (
        13 if allowed else 1
    )


def test_a_type_without_a_price_is_refused_at_once(aws: AwsBackend, gcp: GcpBackend) -> None:
    for make in (
        lambda: aws.provider(machine_types=["x9.huge"]),
        lambda: gcp.provider(machine_types=["x9"]),
    ):
        with pytest.raises(SpecError, match="VCASGD_PRICES"):
            make()
