"""The unit that `vcasgd join --service` writes."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import run_program

URL = "https://192.0.2.7:8790"
SECRET = "a-token-of-a-gateway"


def write_unit(folder: Path, *options: str, url: str = URL) -> subprocess.CompletedProcess[str]:
    return run_program(
        [sys.executable, "-m", "vcasgd.cli", "join", url, *options, "--service"],
        env={**os.environ, "XDG_CONFIG_HOME": str(folder), "VCASGD_TOKEN": SECRET},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a name that needs quotes."""
    return tmp_path / "100 % $HOME"


@pytest.mark.ci
def test_unit_joins_with_the_given_options_and_limits(folder: Path, tmp_path: Path) -> None:
    # When the command has run twice
    first = write_unit(folder, url="https://198.51.100.9:8790")
    assert "replaced" not in first.stderr
    limits = ("--sandbox", "require", "--max-memory", "2GB", "--max-disk", "1GB")
    shared = ("--share", str(tmp_path), "--allow-network")
    given = ("--hours", "22-6", "--max-cpu", "2", *limits, "--pass-env", "DATA_DIR", *shared)
    done = write_unit(folder, *given)

    # Then there is a unit with the options of the second time
    assert done.returncode == 0, done.stderr
    unit = folder / "systemd" / "user" / "vcasgd-join.service"
    text = unit.read_text()
    assert " ".join(f'"{word}"' for word in (URL, *given)) in text
    assert "replaced the unit that joined https://198.51.100.9:8790\n" in done.stderr
    assert "systemctl --user restart vcasgd-join.service" in done.stderr
    assert "--pass-env DATA_DIR: there is no such variable here" in done.stderr
    assert "Nice=10" in text
    assert "CPUQuota=200%" in text or len(os.sched_getaffinity(0)) == 1
    # Twice as many files, and 1 GB for the agent
    assert "MemoryMax=5000000000\nMemorySwapMax=0\n" in text
    # And the token is in a private file only
    assert SECRET not in text + done.stdout + done.stderr
    secret = folder / "vcasgd" / "join.env"
    assert secret.read_text() == f"VCASGD_TOKEN={SECRET}\n"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    # And systemd understands it
    if shutil.which("systemd-analyze"):
        checked = run_program(["systemd-analyze", "verify", "--user", str(unit)])
        assert unit.name not in checked.stderr, checked.stderr


@pytest.mark.ci
def test_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "systemd").write_text("a file")
    done = write_unit(tmp_path)
    assert done.returncode == 1
    assert "can't write" in done.stderr
    assert str(tmp_path / "systemd") in done.stderr.replace("\n", "")


@pytest.mark.ci
def test_wrong_token_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    done = write_unit(tmp_path, "--token", "token.incomplete")
    assert done.returncode == 1
    assert not list(tmp_path.iterdir())
