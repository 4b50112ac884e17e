"""Terraform on a copy of the repository's roots, with an emulated AWS."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest

from support.ports import free_port, listens
from support.waiting import PATIENCE, await_truth

REPOSITORY = Path(__file__).parents[2]
#: Provider of a root, and filesystem mirrors that may have it: the real one of AWS. That of Google
#: isn't available everywhere; one that has the names and types suffices here.
PROVIDERS = {
    "aws": (
        "registry.terraform.io/hashicorp/aws",
        [os.environ.get("VCASGD_TERRAFORM_AWS_MIRROR", "/opt/tf-plugins")],
    ),
    "gcp": (
        "registry.terraform.io/hashicorp/google",
        [
            os.environ.get("VCASGD_TERRAFORM_GOOGLE_MIRROR", ""),
            "/opt/tf-plugins",
            "/opt/terraform-google/mirror",
            "~/.cache/vcasgd/terraform-google/mirror",
            "~/.terraform.d/plugins",
        ],
    ),
}
#: Files that a root starts or reads.
TREES = ("terraform", "infra", "constraints-runtime.txt", "vcasgd/fleet/data")
#: Seconds; a provider takes some to start, and many more on a busy machine.
COMMAND_SECONDS = 500.0
UBUNTU = {
    "ami_id": "ami-0c0ffee0c0ffee0c0",
    "name": "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-20260601",
    "description": "Ubuntu 24.04",
    "owner_id": "099720109477",
    "public": True,
    "virtualization_type": "hvm",
    "architecture": "x86_64",
    "state": "available",
    "platform": None,
    "image_type": "machine",
    "hypervisor": "xen",
    "root_device_name": "/dev/sda1",
    "root_device_type": "ebs",
    "sriov": "simple",
    "creation_date": "2026-06-01T00:00:00.000Z",
}


def need(found: object, reason: str) -> None:
    """Skip the test with a reason if a prerequisite is missing."""
    if not found:
        pytest.skip(reason)


def need_terraform() -> None:
    need(shutil.which("terraform"), "terraform is not installed")


@dataclass
class Terraform:
    """One root of a copy of the tree. ``environment`` is added to the process's own."""

    copy: Path
    root: str
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path, root: str, mirror: Path | None = None) -> Terraform:
        for name in TREES:
            source, target = REPOSITORY / name, directory / name
            if source.is_dir():
                shutil.copytree(
                    source, target, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*")
                )
            else:
                shutil.copy(source, target)
        configuration = directory / "terraform.rc"
        block = f'filesystem_mirror {{ path = "{mirror}" }}' if mirror else ""
        configuration.write_text(f"provider_installation {{ {block} }}\n" if mirror else "")
        return cls(directory, root, {"TF_CLI_CONFIG_FILE": str(configuration)})

    @classmethod
    def with_provider(cls, directory: Path, root: str) -> Terraform:
        """Return a root with a provider that has at least the names, or skip the test."""
        need_terraform()
        name, places = PROVIDERS[root]
        mirrors = [Path(each).expanduser() for each in places if each]
        found = [each for each in mirrors if (each / name).is_dir()]
        need(found, f"none of {[*map(str, mirrors)]} has a folder {name}")
        return cls.of(directory, root, found[0])

    @property
    def folder(self) -> Path:
        return self.copy / "terraform" / self.root

    def __call__(self, *arguments: str, expect: int = 0, seconds: float = COMMAND_SECONDS) -> str:
        """Run a command and return its output; fail unless its exit status is ``expect``."""
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                ["terraform", *arguments],
                cwd=self.folder,
                env={**os.environ, "TF_IN_AUTOMATION": "1", **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                status: object = process.wait(seconds)
            except subprocess.TimeoutExpired:
                # SIGTERM lets it end its providers and save its state.
                process.terminate()
                status = f"{process.wait(PATIENCE)}, not ready within {seconds} s"
            output.seek(0)
            said = output.read()
        assert status == expect, f"status {status}: {said[-6000:]}"
        return said

    def init(self) -> None:
        self("init", "-input=false", "-no-color")

    def outputs(self) -> dict[str, Any]:
        done = self("output", "-json")
        return {name: each["value"] for name, each in json.loads(done).items()}


@dataclass(frozen=True)
class EmulatedAws:
    """moto's HTTP server in a process of its own."""

    url: str
    environment: Mapping[str, str]

    def client(self, service: str) -> Any:
        return boto3.client(
            service,
            region_name="us-east-1",
            endpoint_url=self.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def instances(self, *filters: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the instances that are not terminated."""
        found = self.client("ec2").describe_instances(Filters=list(filters))["Reservations"]
        rows = [each for reservation in found for each in reservation["Instances"]]
        return [each for each in rows if each["State"]["Name"] != "terminated"]


@contextmanager
def emulated_aws(directory: Path) -> Iterator[EmulatedAws]:
    """Provide an emulated AWS that contains only an Ubuntu image."""
    images = directory / "images.json"
    images.write_text(json.dumps([UBUNTU]))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
        "AWS_EC2_METADATA_DISABLED": "true",
        "VCASGD_PAUSE_SECONDS": "0.2",
    }
    with (directory / "moto.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "emulated_aws.py"), str(port)],
            env={**os.environ, "MOTO_AMIS_PATH": str(images)},
            stdout=log,
            stderr=log,
        )
    try:
        await_truth(lambda: listens(port))
        yield EmulatedAws(url, environment)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
