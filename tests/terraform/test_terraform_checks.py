"""Checks of the HCL without an apply: fmt, validate, and each root's own tests."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from support.terraform_harness import REPOSITORY, Terraform, need_terraform

#: Variables in conditions of policies, which look like permissions.
CONDITION_KEYS = {"ec2:CreateAction", "iam:AWSServiceName", "iam:PassedToService"}


def _without_clouds(directory: Path) -> dict[str, str]:
    """Return an environment whose cloud command lines list no machines."""
    directory.mkdir()
    for name in ("aws", "gcloud"):
        stub = directory / name
        stub.write_text(f'#!/bin/sh\necho "{name} $*" >>"{directory}/calls"\n')
        stub.chmod(0o755)
    return {"PATH": f"{directory}{os.pathsep}{os.environ['PATH']}", "VCASGD_PAUSE_SECONDS": "0.1"}


def test_hcl_is_formatted() -> None:
    need_terraform()
    Terraform(REPOSITORY, ".")("fmt", "-check", "-recursive", "-diff")


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("root", ["aws", "gcp"])
def test_root_passes_its_own_tests(root: str, tmp_path: Path) -> None:
    terraform = Terraform.with_provider(tmp_path / "copy", root)
    terraform.environment |= _without_clouds(tmp_path / "bin")
    terraform.init()
    # When its tests run with mocked responses
    said = terraform("test", "-no-color")
    # Then at least one ran, and all pass
    assert "0 failed" in said
    assert " 0 passed" not in said


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("aws/control-plane", r"(?:ec2|iam|servicequotas):[A-Z]\w+"),
        ("gcp/identity", r"compute\.[A-Za-z]+\.[A-Za-z]+"),
    ],
)
def test_documentation_lists_the_permissions_of_the_controller(file: str, name: str) -> None:
    hcl = (REPOSITORY / "terraform/modules" / file / "main.tf").read_text()
    text = (REPOSITORY / "docs/security.md").read_text()
    section = text.partition("## Cloud permissions of the controller")[2].partition("\n## ")[0]
    granted = set(re.findall(f'"({name})"', hcl)) - CONDITION_KEYS
    assert granted
    assert set(re.findall(f"`({name})`", section)) - CONDITION_KEYS == granted
