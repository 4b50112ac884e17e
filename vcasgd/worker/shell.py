"""Commands of a job that run in bounded time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vcasgd.errors import SetupFailed
from vcasgd.logging import last_lines

#: Lines of the output that an error shows.
SHOWN_LINES = 40
POLL_SECONDS = 0.1
#: In a sandbox (:mod:`vcasgd.agent.sandbox`), only the stack is reached.
NETWORK_REMEDY = (
    "this machine lets jobs reach only the stack; if the command needs more, use another pool, or "
    "have the owner start the machine with vcasgd join --allow-network"
)


def run_command(
    argv: Sequence[str],
    what: str,
    cwd: Path,
    env: Mapping[str, str],
    seconds: float,
    on_progress: Callable[[], None],
    inherited: int,
) -> None:
    """Run a command, and kill its process group after ``seconds``.

    ``what`` is the field of the job file that asks for it. ``on_progress`` is called all the time;
    if it raises, the command is killed. The command inherits the file descriptor ``inherited``.
    Raises :class:`SetupFailed` with the last lines of the output.
    """
    with tempfile.NamedTemporaryFile() as output:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            pass_fds=(inherited,),
        )
        deadline, ended = time.monotonic() + seconds, False
        try:
            while not (ended := _has_ended(process.pid)) and time.monotonic() < deadline:
                on_progress()
                time.sleep(POLL_SECONDS)
        finally:
            # Also what the command has left running.
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        if not ended or status:
            has_network = any(name != "lo" for _, name in socket.if_nameindex())
            how = f"ended with status {status}" if ended else f"took more than {seconds:.0f} s"
            raise SetupFailed(
                f"{what}: the command {how}",
                remedy=None if has_network else NETWORK_REMEDY,
                traceback="\n".join(last_lines(Path(output.name), SHOWN_LINES)),
            )


def _has_ended(pid: int) -> bool:
    """Return True if a child has ended. It stays a zombie, so its group keeps its number."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
