"""Clocks of machines that were suspended, and of a ledger that is set while a job trains."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clocks import SteppingClock, SteppingServer
from support.harness import Harness
from support.training import Training

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

    training.await_success()
