"""``vcasgd doctor`` on accounts that allow too little: moto's EC2, and a fake of Google's APIs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from support.emulated_ec2 import EmulatedEc2
from support.provider_backends import AwsBackend, GcpBackend, aws_backend, gcp_backend
from typer.testing import CliRunner

from vcasgd.cli.commands import app

Found = dict[str, dict[str, str]]
STANDARD_SPOT, GRAPHICS_SPOT, STANDARD = "L-34B43A08", "L-3819A6DF", "L-1216C47A"
#: Prices of types that the packaged table doesn't list.
PRICES = {
    "as_of": "2026-11-20",
    "source": "made up",
    "types": {"p3.2xlarge": {"cpus": 8, "gpus": 1}, "p5.48xlarge": {"cpus": 192, "gpus": 8}},
    "on_demand": {"us-east-1": {"p3.2xlarge": 3, "p5.48xlarge": 50}},
}
P_SPOT, P5_SPOT, P = "L-7212CCBC", "L-C4BD4855", "L-417A185B"


@pytest.fixture
def doctor(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Found]:
    prices = tmp_path / "prices.yaml"
    prices.write_text(yaml.safe_dump({"aws": PRICES}))
    monkeypatch.setenv("VCASGD_PRICES", str(prices))

    def run(pool: dict[str, object]) -> Found:
        file = tmp_path / "pools.yaml"
        file.write_text(yaml.safe_dump({"pools": [{"name": "cloud", **pool}]}))
        monkeypatch.setenv("VCASGD_POOLS", str(file))
        done = CliRunner().invoke(app, ["doctor", "--json"])
        return {row["check"]: row for row in json.loads(done.stdout)}

    return run


@pytest.fixture(scope="module")
def aws() -> Iterator[AwsBackend]:
    with aws_backend() as backend:
        yield backend


@pytest.fixture
def ec2(aws: AwsBackend) -> EmulatedEc2:
    quotas = (STANDARD_SPOT, GRAPHICS_SPOT, STANDARD, P_SPOT, P5_SPOT, P)
    aws.ec2.quotas = dict.fromkeys(quotas, 256)
    return aws.ec2


def aws_pool(ec2: EmulatedEc2, *types: str, spot: bool = True) -> dict[str, object]:
    subnets = ec2.subnets()
    zone = min(subnets)
    template = {"launch_template": ec2.template(), "subnets": {zone: subnets[zone]}}
    return {
        "provider": "aws", "region": "us-east-1", "zones": [zone], "spot": spot,
        "machine_types": [*types], "template": template,
    }  # fmt: skip


def test_account_that_allows_the_pool(doctor: Callable[..., Found], ec2: EmulatedEc2) -> None:
    found = doctor(aws_pool(ec2, "c5.large"))

    assert not found.keys() & {"account", "permissions", "quota"}
    assert "VCASGD_CLUSTER" in found["cluster"]["remedy"]
    assert "RunInstances" in ec2.calls, "the dry run was asked for"
    assert ec2.alive() == [], "and nothing was launched"


def test_no_permission_to_run_instances(doctor: Callable[..., Found], ec2: EmulatedEc2) -> None:
    ec2.refuse("RunInstances", "UnauthorizedOperation", 403)
    found = doctor(aws_pool(ec2, "c5.large"))["permissions"]
    assert "pool cloud: no permission to launch machines: ec2:RunInstances" in found["message"]
    assert "docs/security.md" in found["remedy"]


@pytest.mark.parametrize(
    ("types", "spot", "code", "least", "limit"),
    [
        (["c5.large", "m5.2xlarge"], True, STANDARD_SPOT, 2, 0),
        (["g5.xlarge"], True, GRAPHICS_SPOT, 4, 1),
        (["p3.2xlarge", "p5.48xlarge"], True, P_SPOT, 8, 1),
        (["p5.48xlarge"], True, P5_SPOT, 192, 1),
        (["p5.48xlarge"], False, P, 192, 0),
        (["c5.xlarge"], False, STANDARD, 4, 1),
    ],
)
@pytest.mark.ci
def test_quota_below_the_smallest_machine(
    doctor: Callable[..., Found],
    ec2: EmulatedEc2,
    types: list[str],
    spot: bool,
    code: str,
    least: int,
    limit: int,
) -> None:
    ec2.quotas[code] = limit
    found = doctor(aws_pool(ec2, *types, spot=spot))["quota"]
    assert f"is {limit} vCPUs, and its smallest machine needs {least}" in found["message"]
    assert (
        f"request-service-quota-increase --service-code ec2 --quota-code {code}"
        in (found["remedy"])
    )


def test_quotas_that_may_not_be_read_are_no_finding(
    doctor: Callable[..., Found], ec2: EmulatedEc2
) -> None:
    ec2.quotas.clear()
    assert not doctor(aws_pool(ec2, "c5.large")).keys() & {"account", "permissions", "quota"}


def test_credentials_that_are_refused(doctor: Callable[..., Found], ec2: EmulatedEc2) -> None:
    ec2.refuse("RunInstances", "AuthFailure", 401)
    assert "AuthFailure" in str(doctor(aws_pool(ec2, "c5.large"))["permissions"])


@pytest.fixture
def google() -> Iterator[GcpBackend]:
    with gcp_backend() as backend:
        from vcasgd.fleet.providers.gcp_calls import PERMISSIONS

        backend.compute.granted = set(PERMISSIONS)
        backend.compute.quotas = {
            "CPUS": {"limit": 24, "usage": 4},
            "PREEMPTIBLE_CPUS": {"limit": 64, "usage": 0},
        }
        yield backend


@pytest.fixture
def google_pool(
    google: GcpBackend, doctor: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> dict[str, object]:
    monkeypatch.setenv("VCASGD_COMPUTE_URL", google.url)
    template = {"project": google.compute.project, "instance_template": "workers"}
    return {
        "provider": "gcp", "region": "us-central1", "zones": ["us-central1-a"],
        "machine_types": ["e2-standard-4", "e2-standard-2"], "template": template,
    }  # fmt: skip


def test_project_that_allows_the_pool(
    doctor: Callable[..., Found], google: GcpBackend, google_pool: dict[str, object]
) -> None:
    found = doctor(google_pool)
    assert not found.keys() & {"account", "permissions", "quota", "pools"}
    asked = {path for _, path in google.compute.requests}
    assert {"regions/us-central1", "/v1/projects/project:testIamPermissions"} <= asked


def test_project_without_permission(
    doctor: Callable[..., Found], google: GcpBackend, google_pool: dict[str, object]
) -> None:
    google.compute.granted.discard("compute.instances.create")
    assert "compute.instances.create" in doctor(google_pool)["permissions"]["message"]


@pytest.mark.parametrize(
    ("spot", "quotas", "text"),
    [
        (True, {"PREEMPTIBLE_CPUS": (2, 1)}, "is 2 vCPUs, of which 1 are used"),
        # Spot machines then count as others.
        (True, {"PREEMPTIBLE_CPUS": (0, 0), "CPUS": (8, 7)}, "CPUS of us-central1 is 8 vCPUs"),
        (True, {"PREEMPTIBLE_CPUS": (0, 0), "CPUS": (0, 0)}, "is 0 vCPUs"),
        (False, {"CPUS": (5, 4)}, "and its smallest machine needs 2"),
    ],
)
def test_region_without_quota(
    doctor: Callable[..., Found],
    google: GcpBackend,
    google_pool: dict[str, object],
    spot: bool,
    quotas: dict[str, tuple[float, float]],
    text: str,
) -> None:
    for metric, (limit, usage) in quotas.items():
        google.compute.quotas[metric] = {"limit": limit, "usage": usage}
    found = doctor({**google_pool, "spot": spot})["quota"]
    assert text in found["message"]
    assert "IAM & Admin > Quotas" in found["remedy"]


def test_project_whose_api_refuses(
    doctor: Callable[..., Found], google: GcpBackend, google_pool: dict[str, object]
) -> None:
    google.compute.refuse("testIamPermissions", 403, "SERVICE_DISABLED")
    assert "403" in doctor(google_pool)["account"]["message"]
