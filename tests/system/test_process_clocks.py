"""Wall clocks of workers, the parameter server, and the controller that are set while a job trains.

Each process has a clock of its own, as on a machine of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clocks import SteppingClock
from support.harness import Harness
from support.training import Training
from support.waiting import await_truth

HOUR = 3600


@pytest.fixture
def clocks(tmp_path: Path) -> dict[str, SteppingClock]:
    return {name: SteppingClock(tmp_path / name) for name in ("worker", "server", "controller")}


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path / "harness", heartbeat=0.5)
    yield harness
    harness.end()


@pytest.mark.extended
@pytest.mark.parametrize(
    "steps",
    [
        {"worker": -HOUR, "server": HOUR, "controller": -HOUR},
        {"worker": HOUR, "server": -HOUR, "controller": HOUR},
    ],
    ids=["controller-back", "controller-forward"],
)
def test_a_job_survives_steps_of_the_clocks_of_its_processes(
    harness: Harness, clocks: dict[str, SteppingClock], steps: dict[str, int]
) -> None:
    # Given two workers, one of which has a clock of its own, as the server and the controller
    training = Training(harness, samples=2000, epochs=1, checkpoint={"every": "1s"})
    server = harness.start_server(fresh_env=clocks["server"].env)
    controller = harness.start_job_loop(fresh_env=clocks["controller"].env)
    name = harness.start_worker(training.job, fresh_env=clocks["worker"].env)
    training.add_workers(1)
    training.await_steps(name, 3)
    for child in (server, controller, harness.workers[name]):
        assert "clock.so" in Path(f"/proc/{child.pid}/maps").read_text(), "the fault fires"
    await_truth(lambda: stored(harness, training.job))

    # When all three clocks are set
    for process, seconds in steps.items():
        clocks[process].set(seconds)

    # Then training and checkpoints go on, no lease is lost, and no process is replaced
    before = stored(harness, training.job)
    training.await_steps(name, len(training.steps_of(name)) + 3)
    await_truth(lambda: stored(harness, training.job) - before)
    training.await_success()
    (event,) = harness.events(training.job, "job-succeeded")
    assert abs(event["at"] - time.time() - steps["controller"]) < HOUR / 2, "the fault fired"
    assert harness.jobs.work(training.job).get("expired", 0) == 0
    assert server.alive
    assert controller.alive


def stored(harness: Harness, job: str) -> set[str]:
    """Return the names of all checkpoints."""
    return {each.name for each in harness.checkpoints(job).all()}
