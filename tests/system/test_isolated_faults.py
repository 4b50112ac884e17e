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
