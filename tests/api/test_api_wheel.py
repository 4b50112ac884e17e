"""The package that a stack offers to machines that join, installed with pip as they do."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.api_harness import serving
from support.waiting import PATIENCE

import vcasgd
from vcasgd.api import wheel


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("static")) as http:
        yield http


def pip(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of pip; its requirements are installed here already."""
    options = ["--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(folder)]
    argv = [sys.executable, "-m", *shlex.split(command), *options]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.ci
def test_a_machine_installs_the_version_of_its_stack(stack: httpx.Client, tmp_path: Path) -> None:
    done = pip(wheel.install_command(str(stack.base_url), own_certificate=False), tmp_path)

    assert done.returncode == 0, done.stderr
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import vcasgd; "
    program += "print(vcasgd.__file__); from vcasgd.cli import main; main()"
    said = subprocess.run(
        [sys.executable, "-I", "-c", program, "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    ).stdout.splitlines()
    assert said[0] == str(tmp_path / "vcasgd" / "__init__.py")
    assert vcasgd.__version__ in said[1]
    # With the example of the demo, the scripts, and all files that workers need
    assert (tmp_path / "vcasgd/_examples/digits/demo.yaml").exists()
    assert (tmp_path / "bin" / "vcasgd").exists()
    for path in Path(vcasgd.__file__).parent.rglob("*.lua"):
        assert (tmp_path / "vcasgd" / path.relative_to(Path(vcasgd.__file__).parent)).exists()


def test_another_content_than_the_command_names_is_refused(
    stack: httpx.Client, tmp_path: Path
) -> None:
    command = wheel.install_command(str(stack.base_url), own_certificate=False)

    done = pip(re.sub(r"sha256=\w+", f"sha256={'0' * 64}", command), tmp_path)

    assert done.returncode != 0
    assert not (tmp_path / "vcasgd").exists()


def test_the_address_without_a_name_leads_to_it(stack: httpx.Client) -> None:
    answer = stack.get("/wheel", follow_redirects=True)

    assert answer.url.path.endswith(f"/{wheel.NAME}")
    assert answer.headers["ETag"].strip('"') == wheel.wheel()[1]
    assert len(answer.content) == int(answer.headers["Content-Length"])
    assert stack.get("/wheel/vcasgd-9.9-py3-none-any.whl").status_code == 404


def test_the_digest_is_that_of_the_files() -> None:
    digest = wheel.wheel()[1]
    wheel.wheel.cache_clear()
    assert wheel.wheel()[1] == digest


def test_only_a_certificate_that_others_know_is_verified() -> None:
    own = wheel.install_command("https://192.0.2.7:8790", own_certificate=True)

    assert own.startswith(
        "pip install --trusted-host 192.0.2.7:8790 'vcasgd[worker] @ https://192.0.2.7:8790/wheel/"
    )
    assert "trusted" not in wheel.install_command("https://stack", own_certificate=False)
