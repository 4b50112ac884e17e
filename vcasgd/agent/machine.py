"""Resources of this machine: processors, memory, GPUs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from vcasgd.container_limits import memory_bytes, processors
from vcasgd.errors import StackError

#: Seconds for the first import of torch on a slow machine.
TORCH_SECONDS = 300.0
_PROGRAM = """
import json, torch
count = torch.cuda.device_count()
print(json.dumps([count, torch.cuda.get_device_name(0) if count else ""]))
"""


@dataclass(frozen=True)
class ThisMachine:
    """Properties of this machine. ``cpus`` are those that workers may use.

    ``machine``: its name, if the stack ordered it.
    """

    host: str
    cpus: float
    memory_mb: int
    gpus: int
    gpu: str
    machine: str | None = None

    def __str__(self) -> str:
        gpu = f"{self.gpus} × {self.gpu}" if self.gpus else "no GPU"
        return f"{self.cpus:g} processors, {self.memory_mb / 1000:.0f} GB of memory, {gpu}"


def usable_processors(limit: int | None) -> list[int]:
    """Return the processors that workers may use: all of this process, or the first ones."""
    available = sorted(os.sched_getaffinity(0))
    return available if limit is None else available[:limit]


def measure(usable: Sequence[int]) -> ThisMachine:
    """Measure this machine, of which workers may use these processors.

    Raises :class:`StackError` if torch can't be used.
    """
    gpus, gpu = _gpus()
    return ThisMachine(
        host=socket.gethostname(),
        cpus=min(float(len(usable)), processors()),
        memory_mb=int(memory_bytes() / 1e6),
        gpus=gpus,
        gpu=gpu[:100],
    )


def _gpus() -> tuple[int, str]:
    """Return the number of GPUs and the name of the first one.

    Another process finds out, because torch would stay in the memory of this one.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            capture_output=True,
            text=True,
            timeout=TORCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        why_not = f"its import takes more than {TORCH_SECONDS:g} s"
        raise StackError(f"torch can't be used on this machine: {why_not}") from None
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or ["it ended at once"]
        raise StackError(f"torch can't be used on this machine: {why[0]}")
    count, name = json.loads(done.stdout.splitlines()[-1])
    return int(count), str(name)
