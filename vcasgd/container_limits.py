"""Limits of this process: memory and processors of the machine, or fewer in a container; files.

psutil and :func:`os.cpu_count` know only the machine. A container's limits are those of its control
groups, of version 1 or 2, and of the groups around them; see cgroups(7).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

_ROOT = Path("/")
_UNLIMITED = float("inf")


def memory_bytes(root: Path = _ROOT) -> int:
    """Return the memory that this process may use, together with others of its container."""
    limits = (_memory_limit(group) for group in _groups("memory", root))
    return int(min([psutil.virtual_memory().total, *limits]))


def free_memory_bytes(root: Path = _ROOT) -> int:
    """Return the memory that is left without swapping, or without the end of a process."""
    left = (_memory_limit(group) - _memory_use(group) for group in _groups("memory", root))
    return max(0, int(min([psutil.virtual_memory().available, *left])))


def processors(root: Path = _ROOT) -> float:
    """Return the number of processors that this process may use; a container's can be broken."""
    return min([float(len(os.sched_getaffinity(0))), *map(_quota, _groups("cpu", root))])


def raise_file_limit() -> int:
    """Let this process open as many files as it may. Return their number."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the control groups of this process with a controller, from the innermost one on."""
    try:
        own = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    # Of version 2 without a name.
    paths = {name: path for line in own for _, names, path in [line.split(":", 2)]
             for name in names.split(",")}  # fmt: skip
    for mount in mounts:
        where, _, what = mount.partition(" - ")
        kind, _, options = what.split(" ", 2)
        name = "" if kind == "cgroup2" else controller
        of_version_1 = kind == "cgroup" and controller in options.split(",")
        if name in paths and (kind == "cgroup2" or of_version_1):
            top, place = where.split()[3:5]
            below = _below(paths[name], top)
            yield from (root / place.lstrip("/") / each for each in (below, *below.parents))


def _below(path: str, top: str) -> PurePosixPath:
    """Return the path of a group below the one that is mounted; "." if it is not below."""
    own = PurePosixPath(path)
    if ".." in own.parts or not own.is_relative_to(top):
        return PurePosixPath()
    return own.relative_to(top)


def _memory_limit(group: Path) -> float:
    return min(_number(group / "memory.max"), _number(group / "memory.limit_in_bytes"))


def _memory_use(group: Path) -> float:
    """Return the bytes in use, without those of files that the kernel drops first."""
    used = min(_number(group / "memory.current"), _number(group / "memory.usage_in_bytes"))
    fields = dict(line.split(maxsplit=1) for line in _read(group / "memory.stat").splitlines())
    # Of version 1, the field without "total_" leaves out the groups below.
    cached = fields.get("total_inactive_file", fields.get("inactive_file", "0"))
    return 0.0 if used == _UNLIMITED else used - float(cached)


def _quota(group: Path) -> float:
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    if words := _read(group / "cpu.max").split():
        quota, period = float(words[0].replace("max", "inf")), float(words[-1])
    return quota / period if 0 < quota < _UNLIMITED else _UNLIMITED


def _number(file: Path) -> float:
    text = _read(file).strip()
    return float(text) if text not in ("", "max") else _UNLIMITED


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
