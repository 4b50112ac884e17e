"""Limits of an AWS account for a pool: a dry run of a launch, and the quotas of vCPUs.

Quotas: https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from vcasgd.errors import CloudDenied, FleetError, InvalidRequest
from vcasgd.fleet.pools import AwsPoolSpec
from vcasgd.fleet.providers.aws.calls import CLUSTER_TAG, call, client, template_of
from vcasgd.fleet.providers.base import AccountAnswer, AccountQuota

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
    service = client("service-quotas", pool.region)
    found = []
    for code, number in least.items():
        request = {"ServiceCode": "ec2", "QuotaCode": code}
        try:
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
