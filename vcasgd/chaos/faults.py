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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

from vcasgd.chaos.scenario import Counts
from vcasgd.errors import StackError
from vcasgd.fleet.providers.local.processes import Process
from vcasgd.fleet.providers.local.provider import LocalProvider

#: Seconds for a fault to find a target and take effect.
FIRE_SECONDS = 300.0
POLL_SECONDS = 0.05
#: Size of the disk of checkpoints in bytes; the audited job's have a few kilobytes.
DISK_BYTES = 16 * 2**20
T = TypeVar("T")

_BLOCK = bytes(2**16)
_SOURCE = Path(__file__).with_name("clock.c")
#: The content of a process's file: seconds after the true time, reads of an untrue time, and the
#: seconds in which the machine was suspended.
_CLOCK = struct.Struct("lLl")


def await_fault(poll: Callable[[], T | None], why: str) -> T:
    """Return the first result that isn't empty; without one, raise :class:`StackError`, which says
    why the fault did not fire."""
    deadline = time.monotonic() + FIRE_SECONDS
    while not (result := poll()):
        if time.monotonic() > deadline:
            raise StackError(f"the fault did not fire: {why}")
        time.sleep(POLL_SECONDS)
    return result


def check_lasted(lasted: bool, why: str) -> None:
    """Raise :class:`StackError` unless a fault lasted until its end."""
    if not lasted:
        raise StackError(f"the fault did not last: {why}")


# Each of these faults lasts as long as its ``with`` block, which begins when it has taken effect.
# It raises StackError if it did not fire or did not last.


@contextmanager
def freeze(name: str, processes: Callable[[], set[Process]]) -> Iterator[None]:
    """Send SIGSTOP to all processes of a part or machine, and SIGCONT in the end.

    ``processes`` finds them, which may fork meanwhile.
    """
    frozen: set[Process] = set()

    def are_stopped() -> bool:
        nonlocal frozen
        before, frozen = frozen, processes()
        _signal(frozen, signal.SIGSTOP)
        return frozen == before != set() and all(map(_is_stopped, frozen))

    try:
        await_fault(are_stopped, f"{name} could not be frozen")
        yield
        lasted = all(map(_is_stopped, frozen))
    finally:
        _signal(frozen, signal.SIGCONT)
    check_lasted(lasted, f"{name} died or ran while frozen")


def _signal(processes: Iterable[Process], number: signal.Signals) -> None:
    for process in processes:
        if process.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _is_stopped(process: Process) -> bool:
    try:
        return process.alive() and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


@contextmanager
def slow_fsync(name: str, process: Process, delay: float) -> Iterator[None]:
    """Delay each fsync of a process by so many seconds, with strace."""
    if shutil.which("strace") is None:
        raise StackError(
            "slow-fsync needs strace", remedy="install it (Debian: apt install strace)"
        )
    calls = "fsync,fdatasync"
    with tempfile.NamedTemporaryFile("r", prefix="vcasgd-strace-") as log:
        argv = ["strace", "-f", "-p", str(process.pid), "-o", log.name, "-e", f"trace={calls}"]
        argv += ["-e", f"inject={calls}:delay_enter={round(delay * 1e6)}"]
        with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as strace:

            def has_delayed() -> bool:
                if strace.poll() is not None:
                    raise StackError(
                        f"the fault did not fire: strace did not delay {name}",
                        remedy="allow ptrace: run as root, or set kernel.yama.ptrace_scope to 0",
                    )
                return "(DELAYED)" in Path(log.name).read_text()

            try:
                await_fault(has_delayed, f"strace did not delay {name}")
                yield
                lasted = strace.poll() is None and process.alive()
            finally:
                # It detaches from the process.
                strace.terminate()
    check_lasted(lasted, f"{name} or strace died")


@contextmanager
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


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Keep a file that takes all the space that is left on the disk of a folder."""
    path = folder / "full-disk"
    with path.open("wb", buffering=0) as file:
        try:
            while file.tell() <= DISK_BYTES:
                file.write(_BLOCK)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        else:
            raise StackError("the fault did not fire: the disk is larger than expected")
    yield
    lasted = path.exists()
    path.unlink(missing_ok=True)
    check_lasted(lasted, "the file that filled the disk is gone")


@contextmanager
def limited_capacity(provider: LocalProvider, counts: Counts) -> Iterator[None]:
    """Let the capacity of a local pool follow a list of numbers.

    Machines beyond the capacity are killed, the youngest first, and no new ones start.
    """
    taken: set[str] = set()
    stopped = threading.Event()

    def limit(count: int) -> None:
        """Set the capacity, and return when no more machines are left."""
        provider.override(capacity=count)

        def are_few() -> bool:
            surplus = sorted(provider.machines(), key=lambda one: one.launched_at)[count:]
            for one in surplus:
                provider.kill(one.id)
                taken.add(one.id)
            return not surplus

        await_fault(are_few, f"more than {count} machines are left")

    def follow() -> None:
        for count in counts.machines[1:]:
            if stopped.wait(counts.seconds):
                return
            limit(count)

    try:
        limit(counts.machines[0])
        with ThreadPoolExecutor(1, "capacity") as thread:
            following = thread.submit(follow)
            try:
                yield
            finally:
                stopped.set()
        following.result()
    finally:
        provider.override()
    if not taken:
        raise StackError("the fault did not fire: the pool had no machine to take")


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


@contextmanager
def step_clock(
    name: str, clocks: Clocks, processes: Callable[[], set[Process]], seconds: int
) -> Iterator[None]:
    """Step the wall clocks of processes, which a function finds, and step them back in the end."""
    #: Those that have read the clock since the step.
    misled: set[Process] = set()

    def step(ahead: int) -> None:
        clocks.set((each.pid for each in processes()), ahead)

    def is_read() -> bool:
        misled.update(each for each in processes() if clocks.has_read(each.pid))
        return bool(misled)

    try:
        step(seconds)
        await_fault(is_read, f"{name} did not read its clock")
        yield
        lasted = any(each.alive() for each in misled)
    finally:
        step(0)
    check_lasted(lasted, f"{name} died")
