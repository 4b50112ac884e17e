"""Ends of processes, also of those that can't be killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest
from support.waiting import PATIENCE

from vcasgd.child_process import kill

PROGRAM = [sys.executable, "-c", "input()"]


class WaitsForADevice(subprocess.Popen[bytes]):
    """A process that takes no signal meanwhile."""

    def send_signal(self, sig: int) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("kind", "status"), [(subprocess.Popen, -signal.SIGKILL), (WaitsForADevice, None)]
)
def test_the_end_of_a_process_is_awaited_for_a_limited_time(kind: Any, status: int | None) -> None:
    with kind(PROGRAM, stdin=subprocess.PIPE) as process:
        assert kill(process, seconds=PATIENCE if status else 0.1) == status


def test_a_process_that_has_ended_keeps_its_status() -> None:
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        process.wait(PATIENCE)
        assert kill(process) == 3
