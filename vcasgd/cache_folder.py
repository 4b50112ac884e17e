"""Folders where workers keep code and data on their machine, if no setting names one."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path

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
