"""Audit of a whole stack: the central guarantee of the project in one test."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from vcasgd.chaos.audit import AuditReport
from vcasgd.chaos.killers import Target
from vcasgd.chaos.plan import UNREPLICATED


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kills", "store_nodes", "replicas"),
    [
        (8, 2, 1),
        pytest.param(9, 1, 0, marks=pytest.mark.extended),
        pytest.param(8, 3, 0, marks=pytest.mark.extended),
        pytest.param(10, 1, 1, marks=pytest.mark.extended),
    ],
)
def test_nothing_is_lost_or_repeated_whatever_dies(
    kills: int, store_nodes: int, replicas: int
) -> None:
    # When processes and machines are killed, each target at least once; with replicas, also
    # primaries that don't restart before their replica is promoted
    argv = [
        *(sys.executable, "-m", "vcasgd.cli", "chaos", "audit", "--json", "--kills", str(kills)),
        *("--store-nodes", str(store_nodes), "--replicas", str(replicas)),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=1700, check=False)

    # Then each fault fired, and each sample of each epoch was applied exactly once
    assert done.stdout, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, json.dumps(report, indent=1) + done.stderr[-4000:]
    assert sum(report["kills"].values()) == kills
    assert set(report["kills"]) == {*(Target if replicas else UNREPLICATED)}
    assert set(report["recovery_seconds"]) == set(report["kills"])
    assert report["samples_applied"] == report["samples_expected"] > 0
    assert report["samples_lost"] == report["samples_repeated"] == 0


@pytest.mark.parametrize(
    ("counts", "lost", "repeated"),
    [([3, 3, 3], 0, 0), ([3, 2, 3], 1, 0), ([3, 4, 3], 0, 1), ([0, 3, 5], 3, 2)],
)
def test_report_counts_lost_and_repeated_samples(
    counts: list[int], lost: int, repeated: int
) -> None:
    report = AuditReport(seed=0)

    report.count(torch.tensor(counts, dtype=torch.float32), 3)

    assert (report.samples_lost, report.samples_repeated) == (lost, repeated)
    assert report.samples_expected == 9
    assert report.samples_applied == 9 - lost
    assert report.passed == (lost == repeated == 0)


def test_fault_that_did_not_fire_fails_the_audit() -> None:
    assert not AuditReport(seed=0, failure="the fault did not fire").passed
