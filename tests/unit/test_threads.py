"""The death of an essential thread ends its process."""

from __future__ import annotations

import subprocess
import sys

from vcasgd.threads import THREAD_DIED

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


def run(how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=False
    )


def test_a_thread_that_dies_ends_the_process_with_its_traceback() -> None:
    ended = run("dies")

    assert ended.returncode == THREAD_DIED
    assert "the thread essential died" in ended.stderr
    assert "RuntimeError: unexpected" in ended.stderr


def test_a_thread_that_returns_does_not_end_the_process() -> None:
    ended = run("returns")

    assert (ended.returncode, ended.stdout) == (0, "goes on\n")
