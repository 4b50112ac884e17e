"""Ends of processes: of those that can't be killed, and by the death of an essential thread."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest
from support.waiting import PATIENCE

from vcasgd.child_process import kill
from vcasgd.threads import THREAD_DIED


class WaitsForADevice(subprocess.Popen[bytes]):
    """A process that takes no signal meanwhile."""

    def send_signal(self, sig: int) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("kind", "status"), [(subprocess.Popen, -signal.SIGKILL), (WaitsForADevice, None)]
)
def test_the_end_of_a_process_is_awaited_for_a_limited_time(kind: Any, status: int | None) -> None:
    with kind([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert kill(process, seconds=PATIENCE if status else 0.1) == status


def test_a_process_that_has_ended_keeps_its_status() -> None:
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        process.wait(PATIENCE)
        assert kill(process) == 3


PROGRAM = """
import sys, threading
from vcasgd.threads import EssentialThread

class Thread(EssentialThread):
    def work(self):
        if sys.argv[1] == "dies":
            raise RuntimeError("unexpected")

thread = Thread("essential")
thread.start()
thread.join()
print("goes on")
if sys.argv[1] == "dies":
    threading.Event().wait()
"""


@pytest.mark.parametrize("how", ["dies", "returns"])
def test_a_thread_that_dies_ends_the_process_with_its_traceback(how: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=False
    )

    if how == "returns":
        assert (ended.returncode, ended.stdout) == (0, "goes on\n")
    else:
        assert ended.returncode == THREAD_DIED
        assert "the thread essential died" in ended.stderr
        assert "RuntimeError: unexpected" in ended.stderr
