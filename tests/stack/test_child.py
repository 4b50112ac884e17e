"""Restarts of one part of a stack, under a clock that the test sets."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import await_truth

from vcasgd.cluster.commands import Command
from vcasgd.stack import PartState, StackHome
from vcasgd.stack.child import FIRST_PAUSE_SECONDS, HEALTHY_SECONDS, MAX_PAUSE_SECONDS, Child
from vcasgd.stack.home import LOG_BYTES
from vcasgd.stack.parts import StackPart


class Restarts:
    """Part that a test kills, under a clock that the test sets."""

    def __init__(self, home: StackHome) -> None:
        self.now = 0.0
        command = Command(("sleep", "300"), {})
        part = StackPart("part", lambda: command, ready=lambda _started: True)
        self.child = Child(part, home, clock=lambda: self.now)

    def bring_up(self) -> None:
        self.child.update(may_start=True)
        self.child.update(may_start=True)
        assert self.child.state.ready

    def pause(self) -> float:
        """Kill the part, and return the seconds until its restart."""
        pid = self.child.state.pid
        os.kill(pid, signal.SIGKILL)
        while self.child.state.pid == pid:
            self.child.update(may_start=True)
        died = self.now
        while self.child.state.pid == 0:
            self.now += 0.05
            self.child.update(may_start=True)
        self.child.update(may_start=True)
        return self.now - died


@pytest.fixture
def restarts(tmp_path: Path) -> Iterator[Restarts]:
    home = StackHome(tmp_path)
    home.create()
    restarts = Restarts(home)
    yield restarts
    restarts.child.stop(0.0)


def test_restart_pauses_grow_to_a_limit_and_reset_after_health(restarts: Restarts) -> None:
    restarts.bring_up()
    pauses = [restarts.pause() for _ in range(8)]
    assert pauses[0] == pytest.approx(FIRST_PAUSE_SECONDS, abs=0.06)
    assert pauses[1] == pytest.approx(2 * FIRST_PAUSE_SECONDS, abs=0.06)
    assert pauses[-1] == pytest.approx(MAX_PAUSE_SECONDS, abs=0.06)

    restarts.now += HEALTHY_SECONDS + 1

    assert restarts.pause() == pytest.approx(FIRST_PAUSE_SECONDS, abs=0.06)
    assert restarts.child.state.restarts == 9


def test_log_of_a_part_that_runs_is_limited(tmp_path: Path) -> None:
    home = StackHome(tmp_path)
    home.create()
    # Given a part that logs much, as visitors can make the API do
    program = f"head -c {LOG_BYTES + 1} /dev/zero; while sleep 0.05; do echo more; done"
    command = Command(("sh", "-c", program), {})
    child = Child(StackPart("part", lambda: command, ready=lambda _started: True), home)
    log, before = home.log("part"), home.logs / "part.log.1"

    def begins_again() -> bool:
        child.update(may_start=True)
        return before.exists() and log.read_text().startswith("more")

    try:
        await_truth(begins_again)
        assert before.stat().st_size > LOG_BYTES > log.stat().st_size
    finally:
        child.stop(0.0)


def test_part_waits_for_its_dependencies(restarts: Restarts) -> None:
    assert not restarts.child.update(may_start=False)
    assert restarts.child.state == PartState()
