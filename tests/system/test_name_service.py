"""A name service (DNS) that fails for one worker."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.harness import Harness
from support.name_service import NameService
from support.training import Training
from support.waiting import await_truth

#: Seconds; a lease is eight heartbeats.
HEARTBEAT = 0.5
LEASE = 8 * HEARTBEAT

pytestmark = [pytest.mark.slow, pytest.mark.extended]


def test_a_worker_whose_names_do_not_resolve_goes_on_when_they_do(tmp_path: Path) -> None:
    harness = Harness(tmp_path, heartbeat=HEARTBEAT)
    try:
        _run(harness, NameService(tmp_path))
    finally:
        harness.end()


def _run(harness: Harness, names: NameService) -> None:
    # Given two workers, one of which knows its servers by name
    training = Training(harness, samples=12_000, epochs=1, subtasks=120)
    harness.start_server()
    harness.start_job_loop()
    urls = {
        name: harness.env[name].replace("127.0.0.1", names.NAME)
        for name in ("VCASGD_LEDGER_URL", "VCASGD_TENSORS_URL")
    }
    victim = harness.start_worker(training.job, under=names.under, fresh_env=urls)
    (other,) = training.add_workers(1)
    for name in (victim, other):
        training.await_steps(name, 3)

    # When it loses its connections while names don't resolve, for longer than two leases
    names.fail()
    for server in (harness.ledger, harness.tensors):
        server.connection.client_kill_filter(_type="normal", skipme=True)
    failed_at = time.time()
    while (training.heartbeat(other).at or 0.0) < failed_at + 2 * LEASE:
        training.await_steps(other, len(training.steps_of(other)) + 1)
    beat = training.heartbeat(victim).at or 0.0
    assert beat < failed_at + HEARTBEAT, "the fault fired: it has no connection"
    names.publish()
    published_at = time.time()

    # Then the same process goes on, and each sample counts once
    await_truth(lambda: (training.heartbeat(victim).at or 0.0) > published_at)
    training.await_steps(victim, len(training.steps_of(victim)) + 3)
    assert training.worker(victim).alive
    training.await_success()
