"""Faults of one part that must not stop the others: a user's names, and servers that are full."""

from __future__ import annotations

import pytest
from support.harness import Harness
from support.training import Training
from support.waiting import await_truth


@pytest.mark.parametrize("harness", [0.25], indirect=True)
def test_a_data_set_with_methods_of_its_own_keeps_its_leases(harness: Harness) -> None:
    # A subtask takes more than a lease, which is eight heartbeats.
    training = Training(harness, task="named:NamedAudit", samples=200, subtasks=2, step_seconds=0.2)
    (name,) = training.start_with_job_loop(1)
    await_truth(lambda: training.heartbeat(name).samples)

    training.await_success()

    assert harness.jobs.work(training.job).get("expired", 0) == 0


def test_a_full_ledger_ends_no_parameter_server(harness: Harness) -> None:
    training = Training(harness, samples=1000)
    training.start_with_job_loop()
    ledger = harness.ledger.connection

    ledger.config_set("maxmemory", 1)
    log = harness.home / "server-0.log"
    await_truth(lambda: "memory limit" in log.read_text())
    server = harness.server
    training.await_more_samples(training.interval)

    assert server.alive
    ledger.config_set("maxmemory", 0)
    training.await_success()
    assert harness.server is server
    assert server.alive


def test_a_frozen_ledger_does_not_delay_updates(harness: Harness) -> None:
    # Given two jobs whose workers have all the subtasks that they need
    jobs = [Training(harness, samples=2000, epochs=1, subtasks=1) for _ in range(2)]
    harness.start_server()
    harness.start_job_loop()
    for job in jobs:
        job.add_workers(1)
    for job in jobs:
        job.await_more_samples(job.interval)
    log = harness.home / "server-0.log"
    assert "does not answer" not in log.read_text()

    # When the ledger is frozen
    harness.ledger.process.freeze()  # type: ignore[attr-defined]

    # Then each job has many updates applied for each report that the ledger doesn't answer
    for job in jobs:
        job.await_more_samples(20 * job.interval)
    assert log.read_text().count("does not answer") < 10
    harness.ledger.process.thaw()  # type: ignore[attr-defined]
    for job in jobs:
        job.await_success()
