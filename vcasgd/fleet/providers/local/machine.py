"""Local machine: a process that simulates a machine.

It runs the boot command and delivers notices to it through a notice file. It takes everything it
started with it when it goes: at the end of a notice, when it is terminated, when the boot command
ends, or when its owner is gone.

    python -m vcasgd.fleet.providers.local.machine --directory DIRECTORY
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from vcasgd import fork_server
from vcasgd.child_process import adopt_orphans
from vcasgd.errors import FleetError
from vcasgd.fleet.notices import NOTICE_FILE_VARIABLE, NoticeKind, write_notice
from vcasgd.fleet.providers.local.directory import LaunchRequest, MachineDirectory, RunningProcess
from vcasgd.fleet.providers.local.processes import MARKER, Process, kill_all
from vcasgd.steady_time import steady_time

#: Seconds between two polls for orders; each looks up a file, which takes microseconds.
POLL_SECONDS = 0.1
#: Seconds between two polls for the owner of the machine.
OWNER_POLL_SECONDS = 1.0

log = logging.getLogger(__name__)


class Owner:
    """Owner of the machine: the process that holds the lock on ``path``.

    A lock ends with its holder, however that died. A restarted stack acquires it again within the
    grace time, and its machines keep running.
    """

    def __init__(
        self, path: Path, grace_seconds: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._grace = grace_seconds
        self._clock = clock
        self._held_at = self._polled_at = clock()

    def gone(self) -> bool:
        """Return True if the lock has been free for the whole grace time. Never blocks."""
        if self._grace is None:
            return False
        now = self._clock()
        if now - self._polled_at >= min(OWNER_POLL_SECONDS, self._grace / 4):
            self._polled_at = now
            self._held_at = now if is_locked(self._path) else self._held_at
        return now - self._held_at > self._grace


def is_locked(path: Path) -> bool:
    """Return True if a process holds an exclusive ``flock`` on the file.

    The only way to find out is to try, so the file is locked (shared) for some microseconds.
    A process that needs the exclusive lock must therefore retry.
    """
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


class LocalMachine:
    """Machine from power-on to power-off; runs in its own process."""

    def __init__(self, directory: MachineDirectory, launch: LaunchRequest, owner: Owner) -> None:
        self._directory = directory
        self._launch = launch
        self._owner = owner
        self._self = Process.of(os.getpid())
        #: Process number of the boot command.
        self._booted: int | None = None
        # Kept: a Popen that is garbage-collected would take the exit status from _exit_reason.
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> str:
        """Run until only this process is left, and return why the machine went."""
        reason = "its process failed"
        try:
            reason = self._live()
        except Exception:
            # Now, because a provider that sees that the machine is gone may kill this process.
            log.exception("the machine failed to run")
        finally:
            self._power_off(reason)
        return reason

    def _live(self) -> str:
        machine = RunningProcess(self._self, up=False)
        self._directory.report(machine)
        boot_at = self._launch.launched_at + self._launch.boot_seconds
        while (reason := self._end_reason()) is None:
            if self._booted is None and time.time() >= boot_at:
                self._booted = self._boot()
                self._directory.report(replace(machine, up=True))
            time.sleep(POLL_SECONDS)
        return reason

    def _end_reason(self) -> str | None:
        notice_at = self._directory.notice_at()
        if notice_at is not None:
            if not self._directory.notice_file.exists():
                seconds = notice_at - steady_time()
                write_notice(self._directory.notice_file, NoticeKind.TERMINATE, seconds)
            if steady_time() >= notice_at:
                return "evicted"
        if self._directory.marked_terminated() or not self._directory.path.exists():
            return "terminated"
        if self._owner.gone():
            return "its owner is gone"
        return self._exit_reason()

    def _boot(self) -> int:
        boot = self._directory.take_boot().on(self._directory.id)
        own = {MARKER: self._directory.id, NOTICE_FILE_VARIABLE: str(self._directory.notice_file)}
        # Start from what every machine has (PATH, HOME, …), without any of our variables.
        env, folder = {**os.environ, **boot.env, **own}, self._directory.path
        if fork_server.preloaded() and boot.argv[:2] == (sys.executable, "-m"):
            return fork_server.fork_python(boot.argv[1:], env, str(folder))
        self._process = subprocess.Popen(boot.argv, env=env, cwd=folder, stdin=subprocess.DEVNULL)
        return self._process.pid

    def _exit_reason(self) -> str | None:
        """Reap dead children, adopted ones too, and return a reason if the boot command ended."""
        for pid, status in _dead_children():
            if pid == self._booted:
                return f"boot command ended with status {os.waitstatus_to_exitcode(status)}"
        return None

    def _power_off(self, reason: str) -> None:
        self._directory.mark_terminated(reason)
        if not kill_all(self._directory.id, self._self, spare=self._self):
            log.error("some processes of %s can't be killed", self._directory.id)


def _dead_children() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (dead := os.waitpid(-1, os.WNOHANG))[0]:
            yield dead


def _power_on(directory: MachineDirectory) -> None:
    with (directory.path / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # Repeated launch: the machine is already running.
        if directory.marked_terminated() or directory.running() is not None:
            return
        launch = directory.launch()
        owner = Owner(directory.path.parent.parent / "stack.lock", launch.owner_grace_seconds)
        reason = LocalMachine(directory, launch, owner).run()
        log.info("%s: %s", directory.id, reason)


def main() -> None:
    """Start the machine as a daemon in its own session, and return at once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--directory", type=Path, required=True, help="directory of the machine")
    directory = MachineDirectory(parser.parse_args().directory)
    if os.fork():
        os._exit(0)  # Skips the interpreter's cleanup, which may outlast the machine.
    os.setsid()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: directory.mark_terminated("received SIGTERM"))
    adopt_orphans()
    try:
        _power_on(directory)
    except (FleetError, OSError):
        log.exception("the machine failed to run")
        sys.exit(1)


if __name__ == "__main__":
    main()
