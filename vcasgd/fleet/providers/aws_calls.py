"""Calls of EC2: the client, errors, requests as plain data, and the limits of an account.

Only this module imports boto3. Codes of errors:
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html. Quotas:
https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    InvalidRequest,
    NoCapacity,
    QuotaExceeded,
    Throttled,
)
from vcasgd.fleet.pools import AwsPoolSpec
from vcasgd.fleet.prices import is_price
from vcasgd.fleet.providers.base import (
    CONNECTIONS,
    AccountAnswer,
    AccountQuota,
    LaunchOrder,
    fleet_error,
    kind_of,
    refusal_of,
)

#: Time limits of a call; CreateFleet takes some seconds.
CONNECT_SECONDS, READ_SECONDS = 5.0, 20.0
#: botocore's own attempts at a call that was throttled or not answered.
ATTEMPTS = 2
#: One of the few regions that serve the price list, which is that of all regions.
PRICE_LIST_REGION = "us-east-1"
CLUSTER_TAG = "vcasgd:cluster"
POOL_TAG = "vcasgd:pool"
LAUNCH_TAG = "vcasgd:launch"
#: Tag that the machine itself writes.
BOOT_ERROR_TAG = "vcasgd:boot-error"
#: EC2's documented limit on combinations of type and zone in one CreateFleet.
MAX_OVERRIDES = 300

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
#: Patterns of the names of botocore's exceptions without an answer of EC2. After others, the
#: request may have been sent.
_EXCEPTIONS: dict[type[FleetError], str] = {
    CloudDenied: "Credential|Token|SSO",
    InvalidRequest: "Validation|Region|UnknownService|Profile|Config",
}


def client(
    service: str, region: str, *, read_seconds: float = READ_SECONDS, attempts: int = ATTEMPTS
) -> Any:
    """Create a client with time limits. ``AWS_ENDPOINT_URL`` and AWS's other variables apply.

    Raises :class:`FleetError` without credentials.
    """
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=read_seconds,
        retries={"mode": "standard", "total_max_attempts": attempts},
        max_pool_connections=CONNECTIONS,
    )
    with errors(service, None):
        session = boto3.session.Session()
        if session.get_credentials() is None:
            # The client would never look for them again.
            raise NoCredentialsError
        return session.client(service, region_name=region, config=config)


@contextmanager
def errors(what: str, pool: str | None) -> Iterator[None]:
    """Raise the :class:`~vcasgd.errors.FleetError` that an error of EC2 or botocore maps to."""
    try:
        yield
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
        details = error.response.get("Error", {})
        code, message = details.get("Code", "unknown"), details.get("Message", "")
        raise refusal_of(CODES, code, message, status=status, pool=pool) from error
    except BotoCoreError as error:
        kind = kind_of(type(error).__name__, _EXCEPTIONS)
        raise fleet_error(kind, f"{what}: {error}", pool=pool) from error


def call(client: Any, operation: str, pool: str | None, arguments: dict[str, Any]) -> Any:
    """Call EC2. Raises :class:`~vcasgd.errors.FleetError`."""
    with errors(operation, pool):
        return getattr(client, operation)(**arguments)


def listed(
    client: Any, operation: str, rows: str, page: int | None = None, **arguments: Any
) -> list[dict[str, Any]]:
    """Return the ``rows`` (JMESPath) of all pages. Raises :class:`~vcasgd.errors.FleetError`."""
    with errors(operation, None):
        paginator = client.get_paginator(operation)
        pages = paginator.paginate(**arguments, PaginationConfig={"PageSize": page})
        return list(pages.search(rows))


def secret(name: str, region: str) -> str:
    """Return a value from Secrets Manager, with this machine's role. Raises :class:`FleetError`."""
    manager = client("secretsmanager", region)
    return str(call(manager, "get_secret_value", None, {"SecretId": name})["SecretString"])


def list_prices(region: str, kinds: Iterable[str]) -> dict[str, float]:
    """Return the on-demand prices of types in USD per hour, with Linux, from AWS's price list.

    Raises :class:`FleetError`, also without the permission ``pricing:GetProducts``.
    """
    # Networks without a way to it must not hold up anything.
    pricing = client("pricing", PRICE_LIST_REGION, read_seconds=CONNECT_SECONDS, attempts=1)
    prices = {}
    for kind in kinds:
        fields = {
            "instanceType": kind, "regionCode": region, "operatingSystem": "Linux",
            "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used",
        }  # fmt: skip
        filters = [{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in fields.items()]
        request = {"ServiceCode": "AmazonEC2", "Filters": filters}
        products = map(json.loads, call(pricing, "get_products", None, request)["PriceList"])
        found = [
            usd
            for product in products
            for term in product.get("terms", {}).get("OnDemand", {}).values()
            for dimension in term["priceDimensions"].values()
            if dimension.get("unit") == "Hrs"
            and is_price(usd := float(dimension["pricePerUnit"].get("USD", 0)))
        ]
        if price := max(found, default=0.0):
            prices[kind] = price
    return prices


def fleet_request(order: LaunchOrder[AwsPoolSpec], cluster: str, user_data: str) -> dict[str, Any]:
    """Return the arguments of ``CreateFleet``. ``user_data`` is base64."""
    spec, spot = order.spec, order.spot
    tags = [
        {"Key": "Name", "Value": f"{cluster}-{spec.name}"},
        {"Key": CLUSTER_TAG, "Value": cluster},
        {"Key": POOL_TAG, "Value": spec.name},
        {"Key": LAUNCH_TAG, "Value": order.token},
    ]
    allocation = (
        {"SpotOptions": {"AllocationStrategy": "price-capacity-optimized"}}
        if spot
        else {"OnDemandOptions": {"AllocationStrategy": "lowest-price"}}
    )
    template = {**template_of(spec), "LaunchTemplateSpecificationUserData": user_data}
    overrides = [
        _override(spec, kind, zone, spot=spot)
        for kind in order.machine_types
        for zone in order.zones
    ]
    return {
        "Type": "instant",
        "ClientToken": order.token,
        "LaunchTemplateConfigs": [
            {"LaunchTemplateSpecification": template, "Overrides": overrides[:MAX_OVERRIDES]}
        ],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": order.count,
            "DefaultTargetCapacityType": "spot" if spot else "on-demand",
        },
        **allocation,
        "TagSpecifications": [
            {"ResourceType": "instance", "Tags": tags},
            {"ResourceType": "fleet", "Tags": tags},
        ],
    }


def template_of(spec: AwsPoolSpec) -> dict[str, str]:
    """Return the launch template and its version."""
    name = spec.template.launch_template
    key = "LaunchTemplateId" if name.startswith("lt-") else "LaunchTemplateName"
    return {key: name, "Version": spec.template.version}


def tagged(name: str, value: str) -> dict[str, Any]:
    """Return a filter for ``DescribeInstances`` by tag."""
    return filtered(f"tag:{name}", value)


def filtered(name: str, *values: str) -> dict[str, Any]:
    """Return a filter for ``DescribeInstances``."""
    return {"Name": name, "Values": list(values)}


def _override(spec: AwsPoolSpec, kind: str, zone: str, *, spot: bool) -> dict[str, str]:
    subnet = spec.template.subnets.get(zone)
    where = {"SubnetId": subnet} if subnet else {"AvailabilityZone": zone}
    limited = spot and spec.max_price_per_hour is not None
    limit = {"MaxPrice": f"{spec.max_price_per_hour:g}"} if limited else {}
    return {"InstanceType": kind, **where, **limit}


#: Codes of quotas by group of types and spot.
_CODES = {
    ("standard", True): "L-34B43A08",
    ("standard", False): "L-1216C47A",
    ("graphics", True): "L-3819A6DF",
    ("graphics", False): "L-DB2E81BA",
    ("p", True): "L-7212CCBC",
    ("p", False): "L-417A185B",
    ("p5", True): "L-C4BD4855",
    ("p5", False): "L-417A185B",
}
#: Families whose names begin with a letter of the standard ones and that have their own quotas.
_OTHERS = {"inf", "trn", "hpc", "mac", "dl"}


def ask_aws(pool: AwsPoolSpec, cluster: str, cpus: Mapping[str, float]) -> AccountAnswer:
    """Return what the account allows. ``cpus``: vCPUs of known types.

    Raises :class:`FleetError`.
    """
    return AccountAnswer(_denied(pool, cluster), tuple(_quotas(pool, cpus)))


def _denied(pool: AwsPoolSpec, cluster: str) -> str | None:
    zone = pool.zones[0]
    subnet = pool.template.subnets.get(zone)
    request = {
        "DryRun": True,
        "MinCount": 1,
        "MaxCount": 1,
        "InstanceType": pool.machine_types[0],
        "LaunchTemplate": template_of(pool),
        **({"SubnetId": subnet} if subnet else {"Placement": {"AvailabilityZone": zone}}),
        "TagSpecifications": [
            {"ResourceType": "instance", "Tags": [{"Key": CLUSTER_TAG, "Value": cluster}]}
        ],
    }
    try:
        call(client("ec2", pool.region), "run_instances", pool.name, request)
    except InvalidRequest as error:
        # The answer to a dry run that would have succeeded.
        if error.code != "DryRunOperation":
            raise
    except CloudDenied as error:
        return f"ec2:RunInstances: {error.message}"
    return None


def _quotas(pool: AwsPoolSpec, cpus: Mapping[str, float]) -> list[AccountQuota]:
    least: dict[str, float] = {}
    for kind in cpus:
        if (group := _group(kind)) is not None:
            code = _CODES[group, pool.spot]
            least[code] = min(least.get(code, cpus[kind]), cpus[kind])
    found = []
    for code, number in least.items():
        request = {"ServiceCode": "ec2", "QuotaCode": code}
        try:
            service = client("service-quotas", pool.region)
            answer = call(service, "get_service_quota", pool.name, request)
        except FleetError:
            continue  # Not all credentials may read quotas, which launches don't need.
        remedy = (
            "aws service-quotas request-service-quota-increase --service-code ec2 "
            f"--quota-code {code} --region {pool.region} --desired-value 32"
        )
        quota = answer["Quota"]
        name, limit = quota.get("QuotaName", code), float(quota["Value"])
        found.append(AccountQuota(name, limit, number, remedy=remedy))
    return found


def _group(kind: str) -> str | None:
    """Return the group of a type whose machines share a quota, or None if it isn't listed here."""
    match = re.match("[a-z]+", kind)
    family = match[0] if match else ""
    if family in ("g", "gr", "vt"):
        return "graphics"
    if family == "p":
        return {"2": "p", "3": "p", "4": "p", "5": "p5"}.get(kind[1:2])
    return "standard" if family[:1] in "acdhimrtz" and family not in _OTHERS else None
