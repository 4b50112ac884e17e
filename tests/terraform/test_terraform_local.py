"""terraform/local on real processes: the stack of this clone, a model, and no remains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open
from support.ports import free_port
from support.processes import processes_of, run_program
from support.terraform_harness import REPOSITORY, Terraform, need_terraform


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Terraform]:
    need_terraform()
    terraform = Terraform.of(tmp_path / "clone", "local")
    # As after ``make setup``.
    environment = Path(sys.prefix)
    assert (environment / "bin" / "vcasgd").exists(), "the tests run in make's environment"
    (terraform.copy / ".venv").symlink_to(environment)
    port = free_port()
    home = tmp_path / "home"
    terraform.environment |= {"TF_VAR_home": str(home), "TF_VAR_port": str(port)}
    yield terraform
    subprocess.run(
        [environment / "bin/vcasgd", "down", "--home", home], capture_output=True, check=False
    )


@pytest.mark.ci
def test_apply_train_destroy(local: Terraform, tmp_path: Path) -> None:
    # Given a fresh clone
    home = tmp_path / "home"
    local.init()
    local("apply", "-auto-approve", "-no-color")
    # When a job is submitted to the API in the outputs
    outputs = local.outputs()
    token = run_program(outputs["token_command"], shell=True, check=True).stdout.strip()
    environment = {**os.environ, "VCASGD_API_URL": outputs["api_url"], "VCASGD_TOKEN": token}
    job = REPOSITORY / "examples/digits/job.yaml"
    vcasgd = Path(sys.prefix) / "bin/vcasgd"
    submitted = run_program(
        [vcasgd, "submit", job, "--follow", "--set", "epochs=2"], env=environment, timeout=500
    )
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    # Then its model can be downloaded
    model = tmp_path / "model.safetensors"
    listed = run_program([vcasgd, "jobs", "--json"], env=environment, check=True)
    (row,) = json.loads(listed.stdout)
    subprocess.run([vcasgd, "download", row["id"], "--to", model], env=environment, check=True)
    with safe_open(model, framework="pt") as tensors:
        assert list(tensors.keys())
    # And a second apply changes nothing
    local("plan", "-detailed-exitcode", "-no-color", expect=0)
    assert processes_of(home)
    # When it is destroyed, then no process is left, and its stored data is kept
    local("destroy", "-auto-approve", "-no-color")
    assert processes_of(home) == []
    assert list((home / "storage/jobs").iterdir())


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("home", "not/absolute", "home must be an absolute path"),
        ("port", "80", "port must be from 1024 to 65535"),
        ("python", "python3; echo", "python must be a name"),
    ],
)
def test_invalid_variable_is_named(local: Terraform, name: str, value: str, remedy: str) -> None:
    local.init()
    local.environment[f"TF_VAR_{name}"] = value
    assert remedy in local("plan", "-no-color", expect=1)
