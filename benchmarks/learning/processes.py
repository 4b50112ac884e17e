"""Processes of a measurement: start them, wait for them, read their logs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from vcasgd.stack.child import die_with_parent

#: Seconds for one training.
TRAINING_SECONDS = 3600.0
POLL_SECONDS = 0.05


def start(arguments: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )


def wait_until(predicate: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not predicate():
        if time.monotonic() > deadline:
            raise SystemExit(f"not done after {seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def logs(folder: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in folder.glob("*.log"))
