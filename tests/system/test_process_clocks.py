"""Clocks of the ledger, workers, the parameter server, and the controller that are set while a job
trains, and those of machines that were suspended.

Each process has clocks of its own, as on a machine of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clocks import SteppingClock, SteppingServer
from support.harness import Harness
from support.training import Training
from support.waiting import await_truth

from vcasgd.fleet.notices import NoticeKind, write_notice

HOUR = 3600
#: Evaluates lines, and writes the results.
EVALUATOR = """
import sys
from pathlib import Path
from vcasgd.controller.leadership import Leadership
from vcasgd.fleet.notices import FileNotices, Notice, write_notice
from vcasgd.settings import Settings
from vcasgd.steady_time import steady_time
from vcasgd.store.connection import connect
from vcasgd.store.ledger.leases import Renewal
from vcasgd.store.ledger.control import Control
from vcasgd.worker.departure import Departure
for line in sys.stdin:
    print(eval(f"({line})"), flush=True)
"""


class SuspendedProcess:
    """A Python process on a machine that is suspended now and then."""

    def __init__(self, folder: Path) -> None:
        self._clock, self.suspended = SteppingClock(folder), 0
        argv = [sys.executable, "-c", EVALUATOR]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **self._clock.env}
        self._process = subprocess.Popen(
            argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def evaluate(self, expression: str) -> str:
        """Return what an expression is in the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{expression}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def suspend(self, seconds: int) -> None:
        self.suspended += seconds
        self._clock.suspend(self.suspended)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuspendedProcess]:
    process = SuspendedProcess(tmp_path_factory.mktemp("clock"))
    yield process
    process.end()


def test_a_suspended_controller_does_not_believe_in_its_lease(
    process: SuspendedProcess, harness: Harness
) -> None:
    control = f"Control(connect({harness.ledger.url!r}))"
    process.evaluate(f"leadership := Leadership({control}, Settings(heartbeat=60))")
    process.evaluate("leadership.renew()")
    assert process.evaluate("leadership.sure") == "True"

    process.suspend(HOUR)

    assert process.evaluate("leadership.sure") == "False"
    process.evaluate("leadership.renew()")
    assert process.evaluate("leadership.sure") == "True"


def test_a_worker_has_as_much_time_after_its_machine_was_suspended_as_its_notice_says(
    process: SuspendedProcess, tmp_path: Path
) -> None:
    process.suspend(HOUR)

    # by another process of the machine, whose clock was set meanwhile
    write_notice(tmp_path / "notice", NoticeKind.TERMINATE, 20.0 + process.suspended)

    assert process.evaluate(f"notices := FileNotices(Path({str(tmp_path / 'notice')!r}))")
    seconds = float(process.evaluate("notices.poll().at - steady_time()"))
    assert seconds <= 20.0
    assert seconds > 20.0 - HOUR / 2


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("departure.on_notice(Notice('terminate', steady_time() + 600))", "None"),
        (
            "[departure.on_notice(Notice('rebalance', None)), departure.on_renewal(drain)]",
            "departure.on_renewal(drain)",
        ),
    ],
    ids=["notice", "drain"],
)
def test_a_worker_leaves_if_its_machine_was_suspended_beyond_its_deadline(
    process: SuspendedProcess, first: str, then: str
) -> None:
    process.evaluate("departure := Departure(600.0)")
    process.evaluate("drain := Renewal('running', 'drain', frozenset())")
    process.evaluate(first)
    process.evaluate(then)
    assert process.evaluate("departure.leave_if_due()") == "False"

    process.suspend(HOUR)

    process.evaluate(then)
    assert process.evaluate("departure.leave_if_due()") == "True"


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
