"""End of a child process that may not react, not even to SIGKILL."""

from __future__ import annotations

import logging
import subprocess
from typing import Any, Protocol

log = logging.getLogger(__name__)

#: Seconds in which a killed process ends, also one whose memory takes long to be freed.
KILL_SECONDS = 5.0


class Killable(Protocol):
    """The methods of :class:`subprocess.Popen` that are used."""

    args: Any

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = ..., /) -> int: ...


def kill(process: Killable, seconds: float = KILL_SECONDS) -> int | None:
    """Kill a process, and return its exit status, or None if it hasn't ended after ``seconds``.

    A process that waits for a device or a network drive ends only when that answers.
    """
    process.kill()
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        log.error("%s can't be killed: it waits for a device", process.args)
        return None
