"""Files on this machine: private ones, locks that processes share, and folders for caches."""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, TextIO

#: Free bytes below which a disk is full for what a stack writes: a server's file grows by more.
FULL_DISK_BYTES = 4 << 20


def full_disk(folder: Path) -> str | None:
    """Return that the disk of a folder is full; None if it isn't, or if that is not known."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return None
    if free >= FULL_DISK_BYTES:
        return None
    return f"the disk of {folder} is full: {free / 1e6:.1f} MB are free"


def write_private(path: Path, content: str | bytes) -> None:
    """Replace a file atomically; only its owner can read it."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        Path(name).replace(path)
    finally:
        # Only there if it didn't take the place of the other one.
        Path(name).unlink(missing_ok=True)


#: Seconds for which a temporary folder may exist before its process has locked it.
NEW_SECONDS = 60.0


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Create a temporary folder; remove it afterwards, and those of processes that were killed.

    ``prefix`` is the start of the names of both. Processes that inherit open files keep it.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        # It can be gone by now, or another user's.
        with suppress(OSError), _locked(left):
            if time.time() - left.stat().st_mtime > NEW_SECONDS:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder, _locked(Path(folder)):
        yield Path(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises :class:`OSError` if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


#: Seconds between two attempts to take a lock.
POLL_SECONDS = 0.2


@contextmanager
def hold_lock(
    path: Path, seconds: float, on_wait: Callable[[], None] = lambda: None
) -> Iterator[TextIO]:
    """Hold a lock; it ends with its holder, and with processes that inherit the open file.

    ``on_wait`` is called while another process holds it. Raises :class:`TimeoutError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        if not acquire(file, seconds, on_wait):
            raise TimeoutError(f"another process holds {path} for more than {seconds:.0f} s")
        yield file


def acquire(file: IO[Any], seconds: float, on_wait: Callable[[], None] = lambda: None) -> bool:
    """Lock an open file. Return False if another process holds the lock for so long.

    ``on_wait`` is called while it does.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            on_wait()
            time.sleep(POLL_SECONDS)
        else:
            return True


log = logging.getLogger(__name__)

#: Permissions of the group and of others to write.
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@cache
def default_cache_folder(name: str) -> Path:
    """Return ``~/.cache/vcasgd/<name>``, which processes of this user share.

    Code is run from there. So if another user of the machine could write there, or the user has no
    home, it is a new folder, which ends with this process.
    """
    try:
        home = Path.home()
        folder = home / ".cache" / "vcasgd" / name
        if _only_ours(home):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            inner = (folder, *folder.parents)
            if all(_only_ours(each) for each in inner[: inner.index(home)]):
                return folder
        log.warning("others can write to %s; using a temporary folder instead", folder)
    except (OSError, RuntimeError) as error:
        log.warning("no folder for a cache: %s; using a temporary one", error)
    temporary = tempfile.mkdtemp(prefix=f"vcasgd-{name}-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)


def _only_ours(folder: Path) -> bool:
    """Return True if only this user and root can write to a folder."""
    found = folder.stat()
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & _OTHERS_WRITE
