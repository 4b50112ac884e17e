"""``vcasgd doctor`` on accounts that allow too little: moto's EC2, and a fake of Google's APIs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from support.emulated_ec2 import EmulatedEc2
from support.provider_backends import AwsBackend, GcpBackend, aws_backend, gcp_backend
from typer.testing import CliRunner

from vcasgd.cli import app
from vcasgd.fleet.providers.gcp.account import PERMISSIONS

Found = dict[str, dict[str, str]]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Found]:
    for name in [name for name in os.environ if name.startswith("VCASGD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VCASGD_HOME", str(tmp_path / "home"))

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

    assert not found.keys() & {"account", "permissions"}
    assert "RunInstances" in ec2.calls, "the dry run was asked for"
    assert ec2.alive() == [], "and nothing was launched"


def test_no_permission_to_run_instances(doctor: Callable[..., Found], ec2: EmulatedEc2) -> None:
    ec2.refuse("RunInstances", "UnauthorizedOperation", 403)
    found = doctor(aws_pool(ec2, "c5.large"))["permissions"]
    assert "pool cloud: no permission to launch machines: ec2:RunInstances" in found["message"]
    assert "docs/security.md" in found["remedy"]


def test_credentials_that_are_refused(doctor: Callable[..., Found], ec2: EmulatedEc2) -> None:
    ec2.refuse("RunInstances", "AuthFailure", 401)
    assert "AuthFailure" in str(doctor(aws_pool(ec2, "c5.large"))["permissions"])


@pytest.fixture
def google() -> Iterator[GcpBackend]:
    with gcp_backend() as backend:
        backend.compute.granted = set(PERMISSIONS)
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
    assert not found.keys() & {"account", "permissions", "pools"}
    asked = {path for _, path in google.compute.requests}
    assert "/v1/projects/project:testIamPermissions" in asked


def test_project_without_permission(
    doctor: Callable[..., Found], google: GcpBackend, google_pool: dict[str, object]
) -> None:
    google.compute.granted.discard("compute.instances.create")
    assert "compute.instances.create" in doctor(google_pool)["permissions"]["message"]


def test_project_whose_api_refuses(
    doctor: Callable[..., Found], google: GcpBackend, google_pool: dict[str, object]
) -> None:
    google.compute.refuse("testIamPermissions", 403, "SERVICE_DISABLED")
    assert "403" in doctor(google_pool)["account"]["message"]
