"""The benchmark on a GPU, with its sizes for a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.extended
def test_small_models(tmp_path: Path) -> None:
    command = ["benchmarks/gpu.py", "--small", "--seconds", "2", "--only", "gpt-124m", "lora"]
    done = subprocess.run(
        [sys.executable, *command, "--out", str(tmp_path / "gpu.md")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(row["model"], row["workers"]) for row in rows] == [
        ("gpt-124m", 0),
        ("gpt-124m", 1),
        ("gpt-124m", 2),
        # From the kill on.
        ("gpt-124m", 2),
        ("lora", 0),
        ("lora", 1),
        ("lora", 2),
    ], done.stderr
    assert all(row["samples_per_second"] > 0 for row in rows)
    assert "| gpt-124m |" in done.stdout
