"""``benchmarks/profile/rounds.py``: where the time of a round goes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "profile"


@pytest.mark.slow
@pytest.mark.extended
def test_rounds_of_real_workers_are_measured() -> None:
    command = [sys.executable, FOLDER / "rounds.py", "--workers", "2", "--seconds", "3"]

    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)

    head, _, _, _, *rows = done.stdout.splitlines()
    assert head.endswith(" rounds of 2 workers, milliseconds")
    milliseconds = [float(row.split(" | ")[1]) for row in rows[:-1]]
    assert all(each >= 0 for each in milliseconds)
    assert sum(milliseconds) > 80
