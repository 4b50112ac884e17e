"""The measurement of the control plane runs all of its processes, and counts what they do."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.extended
def test_control_plane_is_measured_with_simulated_workers() -> None:
    argv = [
        sys.executable, "-m", "benchmarks.measure", "control", "--workers", "12", "--jobs", "2",
        "--seconds", "3", "--clients", "2", "--finished-jobs", "5", "--lost", "4", "--json",
    ]  # fmt: skip
    result = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=240, env={**os.environ}
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)

    assert figures["admitted"] == 12
    assert figures["heartbeats_per_second"] > 0
    assert figures["updates_per_second"] > 0
    assert figures["worker_errors"] == 0
    assert figures["api_errors"] == []
    assert figures["fleet_rounds"] > 0
    assert figures["lost_decided_seconds"] <= figures["lost_replaced_seconds"]
    assert figures["cores"].keys() >= {"ledger", "tensors", "server", "api", "controller"}
