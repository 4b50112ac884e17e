"""Requests to EC2 as plain data: filters, and the request of a launch."""

from __future__ import annotations

from typing import Any

from vcasgd.fleet.pools import AwsPoolSpec
from vcasgd.fleet.providers.pooled import LaunchOrder

CLUSTER_TAG = "vcasgd:cluster"
POOL_TAG = "vcasgd:pool"
LAUNCH_TAG = "vcasgd:launch"
#: Tag that the machine itself writes.
BOOT_ERROR_TAG = "vcasgd:boot-error"
#: EC2's documented limit on combinations of type and zone in one CreateFleet.
MAX_OVERRIDES = 300


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
