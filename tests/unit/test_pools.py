"""Pools file: accepted content and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vcasgd.errors import SpecError
from vcasgd.fleet.observed import PoolStatus
from vcasgd.fleet.pools import (
    AwsPoolSpec,
    GcpPoolSpec,
    LocalPoolSpec,
    load_pools,
    parse_pools,
    pools_of_job,
)
from vcasgd.spec.job import JobSpec

AWS: dict[str, Any] = {
    "name": "aws-spot",
    "provider": "aws",
    "region": "us-east-1",
    "zones": ["us-east-1a", "us-east-1b"],
    "machine_types": ["c5.xlarge"],
    "template": {
        "launch_template": "lt-0abc",
        "subnets": {"us-east-1a": "subnet-1", "us-east-1b": "subnet-2"},
    },
}
GCP: dict[str, Any] = {
    "name": "gcp-spot",
    "provider": "gcp",
    "region": "us-central1",
    "zones": ["us-central1-a"],
    "machine_types": ["n2-standard-4"],
    "template": {"project": "p", "instance_template": "workers"},
}


def test_default_is_the_local_pool() -> None:
    (pool,) = load_pools(None)
    assert isinstance(pool, LocalPoolSpec)
    assert (pool.name, pool.zones, pool.labels) == ("local", ("local",), frozenset())


def test_pools_keep_their_order_and_have_the_template_of_their_provider(tmp_path: Path) -> None:
    path = tmp_path / "pools.yaml"
    path.write_text(json.dumps({"pools": [GCP, AWS]}))
    gcp, aws = load_pools(path)
    assert isinstance(aws, AwsPoolSpec)
    assert aws.template.version == "$Default"
    assert isinstance(gcp, GcpPoolSpec)
    assert gcp.template.project == "p"


@pytest.mark.parametrize(
    ("pool", "field", "words"),
    [
        ({"name": "a"}, "pools.0.provider", "choose one of local, aws, gcp"),
        ({**AWS, "provider": "azure"}, "pools.0.provider", "unknown provider 'azure'"),
        ({**AWS, "zone": "a"}, "pools.0.zone", "there is no such field"),
        ({**AWS, "name": "A"}, "pools.0.name", "lowercase"),
        ({**AWS, "name": "local"}, "pools.0", "local is reserved for the provider local"),
        ({**GCP, "name": "local"}, "pools.0", "local is reserved for the provider local"),
        ({**AWS, "zones": []}, "pools.0", "zones is required for provider aws"),
        ({**AWS, "region": ""}, "pools.0", "region is required"),
        ({**AWS, "zones": ["a", "a"]}, "pools.0.zones", "contains a duplicate"),
        ({**AWS, "zones": ["us-east-1c"]}, "pools.0", "has no subnet for zone us-east-1c"),
        ({**AWS, "template": {}}, "pools.0.template.launch_template", "is required"),
        ({**AWS, "template": {**AWS["template"], "ami": "x"}}, "pools.0.template.ami", "subnets"),
        ({**AWS, "max_machines": -1}, "pools.0.max_machines", "greater than or equal to 0"),
        ({**AWS, "max_price_per_hour": 0}, "pools.0.max_price_per_hour", "greater than 0"),
        ({**AWS, "labels": ["EU only"]}, "pools.0.labels.0", "dashes between"),
        ({**GCP, "zones": ["europe-west1-b"]}, "pools.0", "is not in region us-central1"),
        ("local", "pools.0", "must be a mapping"),
    ],
)
def test_invalid_pool_names_its_field(pool: object, field: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_pools({"pools": [pool]})
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((each, "at least one") for each in (None, [], {}, {"pools": []}, {"pools": {"a": 1}})),
        ({"pools": [AWS, AWS]}, r"pools\.1\.name: duplicate pool aws-spot"),
    ],
)
def test_invalid_list_is_refused(value: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_pools(value)


SPOT = PoolStatus("spot")
CLEARED_SPOT = PoolStatus("cleared-spot", labels=frozenset({"secret", "eu"}))
CLEARED = PoolStatus("cleared", spot=False, labels=frozenset({"secret"}))
ON_DEMAND = PoolStatus("on-demand", spot=False)
JOINED = PoolStatus("joined", labels=frozenset({"secret"}), provider="join")


@pytest.mark.parametrize(
    ("pools", "labels", "chosen"),
    [
        ([ON_DEMAND, SPOT, CLEARED_SPOT], [], ("spot", "cleared-spot")),
        ([ON_DEMAND], [], ("on-demand",)),
        ([SPOT, CLEARED, CLEARED_SPOT], ["secret"], ("cleared-spot",)),
        ([SPOT, CLEARED], ["secret"], ("cleared",)),
        ([SPOT, ON_DEMAND], ["secret"], ("spot", "on-demand")),
        # others see what runs on their machines
        ([JOINED, SPOT], [], ("spot",)),
        ([JOINED, ON_DEMAND], [], ("on-demand",)),
        ([JOINED, SPOT], ["secret"], ("joined",)),
        ([JOINED], [], ("joined",)),
        ([], [], ()),
    ],
)
def test_a_job_without_pools_uses_the_spot_pools_that_may_see_it(
    pools: list[PoolStatus], labels: list[str], chosen: tuple[str, ...]
) -> None:
    fields = {"name": "job", "task": "t:T", "epochs": 1, "data": {"labels": labels}}

    assert pools_of_job(JobSpec.parse(fields), pools, {}) == chosen
    named = JobSpec.parse({**fields, "workers": {"pools": ["other"]}})
    assert pools_of_job(named, pools, {}) == ("other",)
