"""Disk of the checkpoints that fills up."""

from __future__ import annotations

import contextlib
import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

from vcasgd.chaos.lasting import LastingFault
from vcasgd.errors import StackError

#: Size of the disk in bytes; the audited job's checkpoints have a few kilobytes.
DISK_BYTES = 16 * 2**20
_BLOCK = bytes(2**16)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small file system in memory on a folder.

    Raises :class:`~vcasgd.errors.StackError` without the right to mount.
    """
    folder.mkdir(parents=True, exist_ok=True)
    argv = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={DISK_BYTES},mode=700",
        "vcasgd-chaos",
        str(folder),
    ]
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
