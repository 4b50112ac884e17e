"""Faults that last: processes that are frozen, and a disk that is slow."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

import psutil

from vcasgd.errors import StackError
from vcasgd.fleet.providers.local.processes import Process

#: Seconds for a fault to take effect.
FIRE_SECONDS = 30.0
POLL_SECONDS = 0.01


class LastingFault:
    """Fault that lasts from :meth:`begin` to :meth:`end`.

    Both raise :class:`~vcasgd.errors.StackError` if it did not fire.
    """

    @abstractmethod
    def begin(self) -> None:
        """Return when the fault has taken effect."""

    @abstractmethod
    def end(self) -> None:
        """End the fault, and check that it lasted."""


class Freeze(LastingFault):
    """SIGSTOP to all processes of a part or machine, and SIGCONT in the end."""

    def __init__(self, name: str, processes: Callable[[], set[Process]]) -> None:
        """Initialize with a function that finds the processes, which may fork meanwhile."""
        self._name = name
        self._processes = processes
        self._frozen: set[Process] = set()

    def begin(self) -> None:
        deadline = time.monotonic() + FIRE_SECONDS
        while not self._frozen or any(not _is_stopped(each) for each in self._frozen):
            if time.monotonic() > deadline:
                self._signal(signal.SIGCONT)
                raise StackError(f"the fault did not fire: {self._name} could not be frozen")
            self._frozen = self._processes()
            self._signal(signal.SIGSTOP)
            time.sleep(POLL_SECONDS)
            self._frozen |= self._processes()

    def end(self) -> None:
        lasted = all(_is_stopped(each) for each in self._frozen)
        self._signal(signal.SIGCONT)
        if not lasted:
            raise StackError(f"the fault did not last: {self._name} died or ran while frozen")

    def _signal(self, number: signal.Signals) -> None:
        for process in self._frozen:
            if process.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)


def _is_stopped(process: Process) -> bool:
    try:
        return process.alive() and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


class SlowFsync(LastingFault):
    """Delay of each fsync of a process, injected by strace."""

    def __init__(self, name: str, process: Process, delay: float) -> None:
        """Initialize with the delay in seconds.

        Raises :class:`~vcasgd.errors.StackError` without strace.
        """
        if shutil.which("strace") is None:
            raise StackError(
                "slow-fsync needs strace", remedy="install it (Debian: apt install strace)"
            )
        self._name = name
        self._process = process
        self._delay = delay

    def begin(self) -> None:
        descriptor, path = tempfile.mkstemp(prefix="vcasgd-strace-")
        os.close(descriptor)
        self._log = Path(path)
        calls = "fsync,fdatasync"
        argv = ["strace", "-f", "-p", str(self._process.pid), "-o", path, "-e", f"trace={calls}"]
        argv += ["-e", f"inject={calls}:delay_enter={round(self._delay * 1e6)}"]
        self._strace = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + FIRE_SECONDS
        while "(DELAYED)" not in self._log.read_text():
            if self._strace.poll() is not None or time.monotonic() > deadline:
                self._stop()
                raise StackError(
                    f"the fault did not fire: strace did not delay {self._name}",
                    remedy="allow ptrace: run as root, or set kernel.yama.ptrace_scope to 0",
                )
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        lasted = self._strace.poll() is None and self._process.alive()
        self._stop()
        if not lasted:
            raise StackError(f"the fault did not last: {self._name} or strace died")

    def _stop(self) -> None:
        """End strace, which detaches from the process."""
        self._strace.terminate()
        self._strace.communicate()
        self._log.unlink(missing_ok=True)
