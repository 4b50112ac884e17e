"""Clocks that are set while a job trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clocks import SteppingServer
from support.harness import Harness
from support.training import Training

HOUR = 3600


@pytest.fixture
def stepping(tmp_path: Path) -> Iterator[tuple[Harness, SteppingServer]]:
    ledger = SteppingServer(tmp_path / "ledger", durable=True)
    harness = Harness(tmp_path, heartbeat=0.25, ledger=ledger)
    try:
        yield harness, ledger
    finally:
        harness.end()


@pytest.mark.parametrize("step", [-HOUR, HOUR], ids=["back", "forward"])
@pytest.mark.ci
def test_a_job_survives_a_step_of_the_ledgers_clock(
    stepping: tuple[Harness, SteppingServer], step: int
) -> None:
    # Given a job that loses a worker and its controller
    harness, ledger = stepping
    training = Training(harness, samples=400, epochs=2, subtasks=4)
    harness.start_server()
    controller = harness.start_job_loop()
    names = training.add_workers(2)
    for name in names:
        training.await_steps(name, 3)
    training.worker(names[0]).kill()
    controller.kill()

    # When the ledger's clock is set at that moment
    ledger.set_clock(step)
    harness.start_job_loop()

    # Then another controller and the other worker end the job
    training.await_success()
