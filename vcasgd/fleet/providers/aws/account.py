"""Permission of these credentials to launch machines of a pool, by a dry run."""

from __future__ import annotations

from vcasgd.errors import CloudDenied, InvalidRequest
from vcasgd.fleet.pools import AwsPoolSpec
from vcasgd.fleet.providers.aws.provider import call, client
from vcasgd.fleet.providers.aws.request import CLUSTER_TAG, template_of


def missing_permission(pool: AwsPoolSpec, cluster: str) -> str | None:
    """Return which permission is missing, or None. Raises :class:`~vcasgd.errors.FleetError`."""
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
