"""Audit of a whole stack: the central guarantee of the project in one test."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from support.fuzzer import Fuzzer
from support.harness import worker_credentials
from support.hostile import Hostile

from vcasgd.chaos.audit import UNREPLICATED, AuditReport, audit, describe
from vcasgd.chaos.audited_job import AuditedJob, counting_spec
from vcasgd.chaos.killers import Target
from vcasgd.errors import VcasgdError
from vcasgd.spec.job import JobState

#: Calls of a hostile worker between two pauses, and seconds of a pause; the two cores also train.
CALLS, PAUSE_SECONDS = 20, 0.1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.extended
@pytest.mark.parametrize(
    ("kills", "store_nodes", "replicas"),
    [
        pytest.param(8, 2, 1, marks=pytest.mark.ci),
        (9, 1, 0),
        (8, 3, 0),
        (10, 1, 1),
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
    assert report["samples_applied"] + report["samples_skipped"] == report["samples_expected"]
    assert report["samples_applied"] > report["samples_skipped"] > 0
    assert report["samples_lost"] == report["samples_repeated"] == 0


@pytest.mark.parametrize(
    ("counts", "skipped", "lost", "repeated"),
    [
        ([3, 3, 3], 0, 0, 0),
        ([3, 2, 3], 0, 1, 0),
        ([3, 4, 3], 0, 0, 1),
        ([0, 3, 5], 0, 3, 2),
        ([3, 0, 3], 3, 0, 0),
        ([3, 0, 3], 2, 1, 0),
        ([3, 0, 3], 4, -1, 0),
    ],
)
def test_report_counts_lost_and_repeated_samples(
    counts: list[int], skipped: int, lost: int, repeated: int
) -> None:
    report = AuditReport(seed=0)

    report.count(torch.tensor(counts, dtype=torch.float32), 3, skipped)

    assert (report.samples_lost, report.samples_repeated) == (lost, repeated)
    assert report.samples_expected == 9
    assert report.samples_applied == 9 - lost - skipped
    assert report.passed == (lost == repeated == 0)


def test_fault_that_did_not_fire_fails_the_audit() -> None:
    assert not AuditReport(seed=0, failure="the fault did not fire").passed


class HostileJobs(threading.Thread):
    """Submits one job after the other, and misuses the credentials of its worker until it fails."""

    def __init__(self, audited: AuditedJob) -> None:
        super().__init__(daemon=True)
        self._audited = audited
        self.jobs = audited.jobs
        self._random = random.Random(20)
        self.stopped = threading.Event()
        #: Jobs that were quarantined, and calls that a server executed.
        self.quarantined: list[str] = []
        self.accepted = 0

    def run(self) -> None:
        job: str | None = None
        while not self.stopped.is_set():
            # Servers are killed at any moment. A job that was left alone would keep its machine.
            with suppress(VcasgdError):
                job = job or self._submit()
                self._misuse(job)
                job = None

    def _submit(self) -> str:
        spec = counting_spec(2).model_copy(update={"name": "hostile"})
        return self._audited.client.submit_directory(spec).id

    def _misuse(self, job: str) -> None:
        platform = self._audited.ledger_url, " ".join(self._audited.tensors_urls())
        secret = self._audited.home.ensure_password("jobs")
        env = worker_credentials(*platform, secret, job, Hostile.name)
        hostile = Hostile(self.jobs, job, env)
        fuzzer = Fuzzer(hostile, self._random)
        try:
            hostile.sign_in()
            while not (self.stopped.wait(PAUSE_SECONDS) or self._has_failed(job)):
                for _ in range(CALLS):
                    fuzzer.call()
            self.accepted += fuzzer.accepted
        finally:
            fuzzer.close()
            hostile.close()

    def _has_failed(self, job: str) -> bool:
        if self.jobs.get(job).state is not JobState.FAILED:
            return False
        # Its worker may also have died too often.
        if "job-quarantined" in {event["kind"] for event in self.jobs.events(job)}:
            self.quarantined.append(job)
        return True


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.timeout(1800)
def test_nothing_is_lost_beside_a_hostile_job_with_20_kills() -> None:
    hostile: list[HostileJobs] = []

    @contextmanager
    def fuzzed(job: AuditedJob) -> Iterator[None]:
        hostile.append(HostileJobs(job))
        hostile[0].start()
        try:
            yield
        finally:
            hostile[0].stopped.set()
            hostile[0].join()

    report = audit(print, fuzzed, kills=20, seed=20)

    assert report.passed, "\n".join(describe(report))
    assert sum(report.kills.values()) == 20
    assert report.samples_applied + report.samples_skipped == report.samples_expected
    assert report.samples_lost == report.samples_repeated == 0
    assert hostile[0].quarantined, "the hostile jobs fail"
    assert hostile[0].accepted > 100, "most calls are refused"
