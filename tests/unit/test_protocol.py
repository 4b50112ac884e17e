"""The model of the protocol is correct, and a weakened one is not (docs/protocol)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.missing import skip_here

CHECK = Path(__file__).parents[2] / "docs" / "protocol" / "check.py"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "options",
    [["--quick"], pytest.param(["--deep"], marks=pytest.mark.extended)],
    ids=["quick", "deep"],
)
@pytest.mark.ci
def test_spin_finds_no_error_and_finds_each_missing_check(options: list[str]) -> None:
    for program in ("spin", "cc"):
        if shutil.which(program) is None:
            skip_here(f"{program} is not installed (Debian: apt install spin gcc libc6-dev)")

    done = subprocess.run(
        [sys.executable, CHECK, *options],
        capture_output=True,
        text=True,
        timeout=2900,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
