"""Programs that run to their end, and processes that may end at any moment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from support.waiting import PATIENCE

T = TypeVar("T")


def read_each(processes: Iterable[psutil.Process], read: Callable[[psutil.Process], T]) -> list[T]:
    """Return what `read` returns for each process, without those that have ended."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            found.append(read(process))
    return found


def is_alive(pid: int) -> bool:
    """Return True if a process runs, and is no zombie."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the other processes that have a folder in their arguments or environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = [*process.cmdline(), *process.environ().values()]
            if process.pid != os.getpid() and any(str(folder) in word for word in words):
                found.append(process)
    return found


def run_program(argv: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return its status and its output as text."""
    options = {"check": False, "timeout": PATIENCE, **options}
    return subprocess.run(argv, capture_output=True, text=True, **options)
