"""Finds and kills every process of a local machine.

A real machine takes all its processes with it, so a simulated one must too, including processes
that left the process group, started their own session, or lost their parent. Three marks lead to
them, because each can be lost alone: the tree below the machine's process (which adopts orphans
as a subreaper, but may itself be dead), its session (a daemon leaves it), and :data:`MARKER` in
the environment (programs that rewrite their title overwrite it).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict
from dataclasses import dataclass

import psutil

#: Names the machine in the environment of each of its processes.
MARKER = "VCASGD_MACHINE_ID"
#: Seconds between two rounds of killing; long enough for the kernel to remove dead processes.
_ROUND_SECONDS = 0.02
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """Process, identified by its number and its start in clock ticks after boot.

    The start distinguishes it from a later process with the same number. Unlike psutil's
    ``create_time``, it doesn't change when the system clock is set, so it can be stored.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the process with a number. Raises :class:`ProcessLookupError` if none exists."""
        try:
            return cls(pid, _started(psutil.Process(pid)))
        except psutil.NoSuchProcess as error:
            raise ProcessLookupError(pid) from error

    def alive(self) -> bool:
        """Return True if the process exists and isn't a zombie."""
        try:
            process = psutil.Process(self.pid)
            return _started(process) == self.started and not _is_zombie(process)
        except psutil.Error:
            return False

    def kill(self) -> None:
        """Send SIGKILL, unless the process is dead or belongs to another user."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def processes_of(machine_id: str, root: Process | None) -> set[Process]:
    """Return all living processes of a machine.

    ``root`` is the machine's own process, if known.
    """
    table = {each.pid: each for each in psutil.process_iter(["ppid", "environ"])}
    envs = {pid: each.info["environ"] or {} for pid, each in table.items()}
    marked = {pid for pid, env in envs.items() if env.get(MARKER) == machine_id}
    if root is not None:
        marked |= _session_of(root, table)
    processes = set()
    for pid in _with_descendants(marked, table):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if not _is_zombie(table[pid]):
                processes.add(Process.of(pid))
    return processes


def kill_all(
    machine_id: str, root: Process | None, *, spare: Process | None = None, limit: float = 10.0
) -> bool:
    """Kill a machine's processes until only ``spare`` is left.

    Repeats, because processes may fork in the meantime. Returns False if some survive for
    ``limit`` seconds.
    """
    deadline = time.monotonic() + limit
    while left := _living(machine_id, root) - {spare}:
        if time.monotonic() > deadline:
            return False
        for process in left:
            process.kill()
        time.sleep(_ROUND_SECONDS)
    return True


def _living(machine_id: str, root: Process | None) -> set[Process]:
    living = processes_of(machine_id, root)
    # An exiting process loses its environment, and so its marker, before it is dead.
    return living | {root} if root is not None and root.alive() else living


def _started(process: psutil.Process) -> int:
    # Read first: psutil 6 keeps the boot time of the last call for create_time().
    boot_time = psutil.boot_time()
    return round((process.create_time() - boot_time) * _TICKS_PER_SECOND)


def _is_zombie(process: psutil.Process) -> bool:
    # A main thread may end before the others: the process then looks like a zombie, but lives.
    return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1


def _session_of(root: Process, table: dict[int, psutil.Process]) -> set[int]:
    with contextlib.suppress(ProcessLookupError):
        if Process.of(root.pid) != root:
            return set()  # The number was reused, and with it the session.
    members = set()
    for pid in table:
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == root.pid:
                members.add(pid)
    return members


def _with_descendants(pids: set[int], table: dict[int, psutil.Process]) -> set[int]:
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid, process in table.items():
        children[process.info["ppid"]].append(pid)
    family, queue = set(pids), list(pids)
    while queue:
        fresh = [child for child in children[queue.pop()] if child not in family]
        family.update(fresh)
        queue.extend(fresh)
    return family
