"""Wall clocks of processes that a test or a scenario can set, as an administrator or NTP does.

A preloaded library changes what the C library says the time is; the monotonic clock stays right.
It is not libfaketime, under which Python's ``time.sleep`` fails (it sleeps until a time of the
monotonic clock).
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vcasgd.chaos.faults import FIRE_SECONDS, POLL_SECONDS, LastingFault
from vcasgd.errors import StackError
from vcasgd.fleet.providers.local.processes import Process

_SOURCE = Path(__file__).with_name("clock.c")
#: The content of a process's file: seconds after the true time, reads of an untrue time, and the
#: seconds in which the machine was suspended.
_CLOCK = struct.Struct("lLl")


class Clocks:
    """The clocks of programs that are started with :attr:`env`, and of their children."""

    def __init__(self, folder: Path) -> None:
        """Initialize with a folder for the library and a file for each process.

        Raises :class:`StackError` without a C compiler.
        """
        folder.mkdir(parents=True, exist_ok=True)
        library = folder / "clock.so"
        compiler = shutil.which("cc")
        if compiler is None:
            raise StackError(
                "step-clock needs a C compiler", remedy="install one (Debian: apt install gcc)"
            )
        argv = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE), "-ldl"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise StackError(f"step-clock needs a C compiler that works: {done.stderr[-500:]}")
        self._folder = folder
        self.env = {"LD_PRELOAD": str(library), "STEPPING_CLOCKS": str(folder)}

    @contextmanager
    def for_children(self) -> Iterator[None]:
        """Start processes with such clocks, from here and within the ``with`` block."""
        before = {name: os.environ.get(name) for name in self.env}
        os.environ |= self.env
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def set_all(self, seconds: int, suspended: int = 0) -> None:
        """Set all clocks to so many seconds after the true time, and those of later processes.

        ``suspended`` are the seconds in which the machine seems to have been suspended.
        """
        (self._folder / "default").write_bytes(_CLOCK.pack(seconds, 0, suspended))
        pids = (int(each.name) for each in self._folder.iterdir() if each.name.isdigit())
        self.set(pids, seconds, suspended)

    def set(self, pids: Iterable[int], seconds: int, suspended: int = 0) -> None:
        """Set the clocks of processes; see :meth:`set_all`.

        Processes without such a clock are left out.
        """
        for pid in pids:
            try:
                with (self._folder / str(pid)).open("r+b") as file:
                    file.write(_CLOCK.pack(seconds, 0, suspended))
            except FileNotFoundError:
                continue

    def has_read(self, pid: int) -> bool:
        """Return True if a process has read its clock since it was set to an untrue time."""
        try:
            return bool(_CLOCK.unpack((self._folder / str(pid)).read_bytes())[1])
        except (FileNotFoundError, struct.error):
            return False


class StepClock(LastingFault):
    """Step of a wall clock, and a step back in the end."""

    def __init__(
        self,
        name: str,
        clocks: Clocks,
        processes: Callable[[], set[Process]],
        seconds: int,
    ) -> None:
        """Initialize with a function that finds the processes, and the step in seconds."""
        self._name, self._clocks = name, clocks
        self._processes, self._seconds = processes, seconds
        #: Processes that have read the clock since the step.
        self._misled: set[Process] = set()

    def begin(self) -> None:
        self._set(self._seconds)
        deadline = time.monotonic() + FIRE_SECONDS
        while not self._misled:
            if time.monotonic() > deadline:
                self._set(0)
                raise StackError(f"the fault did not fire: {self._name} did not read its clock")
            time.sleep(POLL_SECONDS)
            self._misled = {each for each in self._processes() if self._clocks.has_read(each.pid)}

    def end(self) -> None:
        lasted = any(each.alive() for each in self._misled)
        self._set(0)
        if not lasted:
            raise StackError(f"the fault did not last: {self._name} died")

    def _set(self, seconds: int) -> None:
        self._clocks.set((each.pid for each in self._processes()), seconds)
