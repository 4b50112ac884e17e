"""Faults that last: frozen processes, slow and full disks, a pool with fewer machines, clocks."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from vcasgd.chaos.scenario import Counts
from vcasgd.errors import FleetError, StackError
from vcasgd.fleet.providers.local.processes import Process
from vcasgd.fleet.providers.local.provider import LocalProvider

#: Seconds for a fault to take effect.
FIRE_SECONDS = 30.0
POLL_SECONDS = 0.01
#: Size of the disk of checkpoints in bytes; the audited job's have a few kilobytes.
DISK_BYTES = 16 * 2**20
_BLOCK = bytes(2**16)
_SOURCE = Path(__file__).with_name("clock.c")
#: The content of a process's file: seconds after the true time, reads of an untrue time, and the
#: seconds in which the machine was suspended.
_CLOCK = struct.Struct("lLl")


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


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small file system in memory on a folder.

    Raises :class:`~vcasgd.errors.StackError` without the right to mount.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={DISK_BYTES},mode=700"
    argv = ["mount", "-t", "tmpfs", "-o", options, "vcasgd-chaos", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StackError(
            f"full-disk needs the right to mount a file system: {done.stderr.strip()}",
            remedy="run as root",
        )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=False)


class FullDisk(LastingFault):
    """File that takes all the space that is left on a disk."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "full-disk"

    def begin(self) -> None:
        with self._file.open("wb", buffering=0) as file:
            try:
                while file.tell() <= DISK_BYTES:
                    file.write(_BLOCK)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    return
                raise
        raise StackError("the fault did not fire: the disk is larger than expected")

    def end(self) -> None:
        lasted = self._file.exists()
        self._file.unlink(missing_ok=True)
        if not lasted:
            raise StackError("the fault did not last: the file that filled the disk is gone")


class LimitedCapacity(LastingFault):
    """Capacity of a local pool that follows a list of numbers.

    Machines beyond the capacity are killed, the youngest first, and no new ones start.
    """

    def __init__(self, provider: LocalProvider, counts: Counts) -> None:
        self._provider = provider
        self._counts = counts
        self._stopped = threading.Event()
        self._failure: FleetError | StackError | None = None
        self._thread = threading.Thread(target=self._follow, name="capacity", daemon=True)
        #: Machines that were taken, when the fault has ended.
        self.taken = 0

    def begin(self) -> None:
        self._limit(self._counts.machines[0])
        self._thread.start()

    def end(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._provider.override()
        if self._failure is not None:
            raise self._failure
        if not self.taken:
            raise StackError("the fault did not fire: the pool had no machine to take")

    def _follow(self) -> None:
        try:
            for count in self._counts.machines[1:]:
                if self._stopped.wait(self._counts.seconds):
                    return
                self._limit(count)
        except (FleetError, StackError) as error:
            self._failure = error

    def _limit(self, count: int) -> None:
        """Set the capacity, and return when no more machines are left."""
        self._provider.override(capacity=count)
        deadline = time.monotonic() + FIRE_SECONDS
        taken: set[str] = set()
        while True:
            present = sorted(self._provider.machines(), key=lambda one: one.launched_at)
            if len(present) <= count:
                break
            if time.monotonic() > deadline:
                raise StackError(f"the fault did not fire: {len(present)} machines are left")
            for one in present[count:]:
                self._provider.kill(one.id)
                taken.add(one.id)
            time.sleep(POLL_SECONDS)
        self.taken += len(taken)


class Clocks:
    """The wall clocks of programs that are started with :attr:`env`, and of their children.

    A preloaded library changes what the C library says the time is; the monotonic clock stays
    right. It is not libfaketime, under which Python's ``time.sleep`` fails (it sleeps until a time
    of the monotonic clock).
    """

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
