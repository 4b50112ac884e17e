"""A local instance: a process that stands in for a machine.

It runs the boot command, answers as the cloud's metadata server would, and takes everything
that it started with it when it goes: at the end of a notice, when it is condemned, when the
boot command ends, or when nobody owns it any more.

    python -m vcasgd.fleet.providers.local.instance --directory DIRECTORY
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
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

from vcasgd.errors import FleetError
from vcasgd.fleet.providers.local.directory import InstanceDirectory, LaunchRequest, MachineRecord
from vcasgd.fleet.providers.local.metadata import Metadata, MetadataServer
from vcasgd.fleet.providers.local.processes import MARKER, Process, kill_all

#: how soon the machine sees an order; a file is looked up, which costs microseconds
POLL_SECONDS = 0.1
#: how often the machine looks whether somebody still owns it
OWNER_POLL_SECONDS = 1.0
_PR_SET_CHILD_SUBREAPER = 36

log = logging.getLogger(__name__)


class Owner:
    """Whoever holds the lock on ``path`` owns the machine.

    A lock ends with its holder, however that died. A stack that is restarted takes it again
    within the grace time, and its machines go on.
    """

    def __init__(
        self, path: Path, grace_seconds: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._grace = grace_seconds
        self._clock = clock
        self._held_at = self._polled_at = clock()

    def gone(self) -> bool:
        """Whether the lock has been free for the whole grace time. Returns at once."""
        if self._grace is None:
            return False
        now = self._clock()
        if now - self._polled_at >= min(OWNER_POLL_SECONDS, self._grace / 4):
            self._polled_at = now
            self._held_at = now if is_locked(self._path) else self._held_at
        return now - self._held_at > self._grace


def is_locked(path: Path) -> bool:
    """Whether anybody holds an exclusive ``flock`` on the file.

    There is no way to ask but to try, so the file is locked (shared) for some microseconds:
    who wants it exclusively must try more than once.
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
    """From power on to power off; lives in its own process."""

    def __init__(self, directory: InstanceDirectory, launch: LaunchRequest, owner: Owner) -> None:
        self._directory = directory
        self._launch = launch
        self._owner = owner
        self._self = Process.of(os.getpid())
        self._metadata = Metadata(directory.id)
        self._server = MetadataServer(self._metadata)
        # kept, because a forgotten Popen would take its process's exit status away from _reap
        self._booted: subprocess.Popen[bytes] | None = None

    def run(self) -> str:
        """Returns why the machine went, when nothing of it is left but this process."""
        reason = "its process failed"
        try:
            reason = self._live()
        finally:
            self._power_off(reason)
        return reason

    def _live(self) -> str:
        self._server.start()
        machine = MachineRecord(self._self, self._server.port, up=False)
        self._directory.report(machine)
        boot_at = self._launch.launched_at + self._launch.boot_seconds
        while (reason := self._verdict()) is None:
            if self._booted is None and time.time() >= boot_at:
                self._booted = self._boot()
                self._directory.report(replace(machine, up=True))
            time.sleep(POLL_SECONDS)
        return reason

    def _verdict(self) -> str | None:
        notice_at = self._directory.notice_at()
        if notice_at is not None:
            self._metadata.notify(notice_at)
            if time.time() >= notice_at:
                return "evicted"
        if self._directory.condemned() or not self._directory.path.exists():
            return "condemned"
        if self._owner.gone():
            return "its owner is gone"
        return self._reap()

    def _boot(self) -> subprocess.Popen[bytes]:
        boot = self._directory.take_boot().on(self._directory.id)
        own = {MARKER: self._directory.id, "VCASGD_METADATA_URL": self._server.url}
        return subprocess.Popen(
            boot.argv,
            # what a machine has anyway (PATH, HOME, …); nothing of ours is read from it
            env={**os.environ, **boot.env, **own},
            cwd=self._directory.path,
            stdin=subprocess.DEVNULL,
        )

    def _reap(self) -> str | None:
        """Takes away the dead, adopted ones too; the end of the boot command is the machine's."""
        for pid, status in _dead_children():
            if self._booted is not None and pid == self._booted.pid:
                return f"boot command ended with status {os.waitstatus_to_exitcode(status)}"
        return None

    def _power_off(self, reason: str) -> None:
        self._directory.condemn(reason)
        if not kill_all(self._directory.id, self._self, spare=self._self):
            log.error("some processes of %s can't be killed", self._directory.id)


def _dead_children() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (dead := os.waitpid(-1, os.WNOHANG))[0]:
            yield dead


def _become_subreaper() -> None:
    """Orphans below this process become its children, so the tree has no gaps (prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        log.warning("not a subreaper: %s", os.strerror(ctypes.get_errno()))


def _power_on(directory: InstanceDirectory) -> None:
    with (directory.path / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # a repeated launch; the machine runs already
        if directory.condemned() or directory.machine() is not None:
            return
        launch = directory.launch()
        owner = Owner(directory.path.parent.parent / "stack.lock", launch.owner_grace_seconds)
        reason = LocalMachine(directory, launch, owner).run()
        log.info("%s: %s", directory.id, reason)


def main() -> None:
    """Returns at once: the machine is a session of its own and nobody's child."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--directory", type=Path, required=True, help="of the instance")
    directory = InstanceDirectory(parser.parse_args().directory)
    if os.fork():
        os._exit(0)  # at once: the interpreter's own farewell may take longer than the machine
    os.setsid()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: directory.condemn("asked to end by SIGTERM"))
    _become_subreaper()
    try:
        _power_on(directory)
    except (FleetError, OSError):
        log.exception("the machine could not run")
        sys.exit(1)


if __name__ == "__main__":
    main()
