"""The unit that `vcasgd join --service` writes."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

URL = "https://192.0.2.7:8790"
SECRET = "a-token-of-a-gateway"


def write_unit(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vcasgd.cli", "join", URL, *options, "--service"],
        env={**os.environ, "XDG_CONFIG_HOME": str(folder), "VCASGD_TOKEN": SECRET},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a name that needs quotes."""
    return tmp_path / "100 % $HOME"


@pytest.mark.ci
def test_unit_joins_with_the_given_options(folder: Path) -> None:
    # When the command has run twice
    write_unit(folder)
    done = write_unit(folder, "--hours", "22-6", "--max-cpu", "2", "--pass-env", "DATA_DIR")

    # Then there is a unit with the options of the second time
    assert done.returncode == 0, done.stderr
    unit = folder / "systemd" / "user" / "vcasgd-join.service"
    text = unit.read_text()
    assert f'"{URL}" "--hours" "22-6" "--max-cpu" "2" "--pass-env" "DATA_DIR"' in text
    assert "systemctl --user enable --now vcasgd-join.service" in done.stderr
    assert "--pass-env DATA_DIR: there is no such variable here" in done.stderr
    assert "Nice=10" in text
    assert "CPUQuota=200%" in text or len(os.sched_getaffinity(0)) == 1
    # And the token is in a private file only
    assert SECRET not in text + done.stdout + done.stderr
    secret = folder / "vcasgd" / "join.env"
    assert secret.read_text() == f"VCASGD_TOKEN={SECRET}\n"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_unit_has_the_sandbox_and_its_limits(folder: Path, tmp_path: Path) -> None:
    limits = ("--sandbox", "require", "--max-memory", "2GB", "--max-disk", "1GB")
    done = write_unit(folder, *limits, "--share", str(tmp_path), "--allow-network")

    assert done.returncode == 0, done.stderr
    text = (folder / "systemd" / "user" / "vcasgd-join.service").read_text()
    assert '"--sandbox" "require" "--max-memory" "2GB" "--max-disk" "1GB"' in text
    assert f'"--share" "{tmp_path}" "--allow-network"' in text
    # Twice as many files, and 1 GB for the agent
    assert "MemoryMax=5000000000\nMemorySwapMax=0\n" in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_understands_the_unit(folder: Path) -> None:
    assert write_unit(folder, "--hours", "22-6").returncode == 0
    unit = folder / "systemd" / "user" / "vcasgd-join.service"
    assert unit.exists()
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert unit.name not in checked.stderr, checked.stderr


def test_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "systemd").write_text("a file")
    done = write_unit(tmp_path)
    assert done.returncode == 1
    assert "can't write" in done.stderr
    assert str(tmp_path / "systemd") in done.stderr.replace("\n", "")


def test_wrong_token_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "vcasgd.cli",
            "join",
            URL,
            "--token",
            "token.incomplete",
            "--service",
        ],
        env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert not list(tmp_path.iterdir())
