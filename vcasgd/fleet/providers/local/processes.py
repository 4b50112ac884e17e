"""Every process of a local instance, found and killed.

A machine takes all its processes with it, so a stand-in for a machine must too: also those
that left the process group, started a session of their own, or lost their parent. Three
marks lead to them, because each can get lost alone: the tree below the instance's process
(which adopts orphans as a subreaper, but may be dead itself), its session (a daemon leaves
it), and :data:`MARKER` in the environment (programs that rewrite their title overwrite it).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: names the instance in the environment of each of its processes
MARKER = "VCASGD_INSTANCE_ID"
#: between two rounds of killing: long enough for the kernel to take the dead away
_ROUND_SECONDS = 0.02


@dataclass(frozen=True)
class Process:
    """A process, told from a later one with the same number by its start in clock ticks."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Raises :class:`ProcessLookupError` if there is none."""
        entry = _entry(pid)
        if entry is None:
            raise ProcessLookupError(pid)
        return entry.process

    def alive(self) -> bool:
        entry = _entry(self.pid)
        return entry is not None and entry.process == self and not entry.zombie

    def kill(self) -> None:
        """SIGKILL; silent if it is dead, or not ours to kill."""
        if self.alive():
            try:
                os.kill(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                return


@dataclass(frozen=True)
class _Entry:
    process: Process
    parent: int
    session: int
    zombie: bool


def processes_of(instance_id: str, root: Process | None) -> set[Process]:
    """All living processes of an instance; ``root`` is the instance's own, if known."""
    table = {entry.process.pid: entry for entry in _entries()}
    found = {pid for pid in table if _is_marked(pid, instance_id)}
    if root is not None:
        found |= _session_of(root, table)
    return {table[pid].process for pid in _with_descendants(found, table)}


def kill_all(
    instance_id: str, root: Process | None, *, spare: Process | None = None, limit: float = 10.0
) -> bool:
    """Kills until none is left but ``spare``; ``False`` if some survive for ``limit`` seconds.

    Processes that fork meanwhile are why it goes on until a look finds nothing.
    """
    deadline = time.monotonic() + limit
    while left := processes_of(instance_id, root) - {spare}:
        if time.monotonic() > deadline:
            return False
        for process in left:
            process.kill()
        time.sleep(_ROUND_SECONDS)
    return True


def _session_of(root: Process, table: dict[int, _Entry]) -> set[int]:
    leader = table.get(root.pid)
    if leader is not None and leader.process != root:
        return set()  # the number was given to somebody else, and so was the session
    return {pid for pid, entry in table.items() if entry.session == root.pid}


def _with_descendants(pids: set[int], table: dict[int, _Entry]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, entry in table.items():
        children.setdefault(entry.parent, []).append(pid)
    found, queue = set(pids), list(pids)
    while queue:
        fresh = [child for child in children.get(queue.pop(), ()) if child not in found]
        found.update(fresh)
        queue.extend(fresh)
    return found


def _entries() -> Iterator[_Entry]:
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and (entry := _entry(int(path.name))) and not entry.zombie:
            yield entry


def _entry(pid: int) -> _Entry | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # proc(5): the name in parentheses may itself hold spaces and parentheses
    state, parent, _, session, *others = stat.rpartition(")")[2].split()
    threads, started = int(others[13]), int(others[15])
    # a main thread may end before the others; then the process looks like a zombie but lives
    zombie = state in "ZX" and threads <= 1
    return _Entry(Process(pid, started), int(parent), int(session), zombie)


def _is_marked(pid: int, instance_id: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{MARKER}={instance_id}".encode() in environment.split(b"\0")
