"""A unit of systemd that joins whenever the machine is on, for the user who runs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vcasgd.agent.sandbox import PROCESSES, Sandbox
from vcasgd.errors import VcasgdError
from vcasgd.local_files import write_private

NAME = "vcasgd-join.service"
#: Seconds for workers to push what they have; see the agent's own limit.
_STOP_SECONDS = 60
#: Memory of the agent itself, and of a process that measures the machine with torch.
_AGENT_BYTES = 1_000_000_000
_UNIT = """\
# Written by vcasgd join --service.
[Unit]
Description=Train for {url}
Wants=network-online.target
After=network-online.target

[Service]
EnvironmentFile={secret}
ExecStart={command}
TimeoutStopSec={stop}
# Limits of the kernel's own, above those of the sandbox. A worker is killed first.
MemoryMax={memory}
MemorySwapMax=0
TasksMax={tasks}
CPUQuota={quota}%
OOMPolicy=continue
Restart=on-failure
RestartSec=60
Nice=10

[Install]
WantedBy=default.target
"""


def install(url: str, token: str, options: Sequence[str], sandbox: Sandbox) -> Path:
    """Write the unit, which runs ``vcasgd join`` with these options, and return its file.

    ``sandbox``: limits of workers, which the unit has too. The token is in a file
    that only the user can read. Raises :class:`~vcasgd.errors.VcasgdError` if a file can't be
    written.
    """
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    unit, secret = home / "systemd" / "user" / NAME, home / "vcasgd" / "join.env"
    command = [sys.executable, "-m", "vcasgd.cli", "join", url, *options]
    text = _UNIT.format(
        url=url.replace("%", "%%"),
        secret=str(secret).replace("%", "%%"),
        command=" ".join(map(_quoted, command)),
        stop=_STOP_SECONDS,
        memory=sandbox.memory + 2 * sandbox.files + _AGENT_BYTES,
        tasks=PROCESSES,
        quota=100 * len(sandbox.processors),
    )
    try:
        for path in (unit, secret):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_private(secret, f"VCASGD_TOKEN={token}\n")
        unit.write_text(text)
    except OSError as error:
        raise VcasgdError(f"can't write {error.filename}: {error.strerror}") from error
    return unit


def _quoted(argument: str) -> str:
    """Quote an argument of ExecStart; see systemd.service(5)."""
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped.replace("%", "%%").replace("$", "$$")}"'
