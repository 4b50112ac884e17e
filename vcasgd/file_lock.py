"""Lock that processes of one machine share, for work that only one of them should do."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

POLL_SECONDS = 0.2


@contextmanager
def hold_lock(
    path: Path, seconds: float, on_wait: Callable[[], None] = lambda: None
) -> Iterator[TextIO]:
    """Hold a lock; it ends with its holder, and with processes that inherit the open file.

    ``on_wait`` is called while another process holds it. Raises :class:`TimeoutError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    with path.open("w") as file:
        while not _acquire(file):
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process holds {path} for more than {seconds:.0f} s")
            on_wait()
            time.sleep(POLL_SECONDS)
        yield file


def _acquire(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
