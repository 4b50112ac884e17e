"""Arguments and output of the scripts of all peers.

Standard library only: each script runs in its peer's own virtual environment.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

#: Uncounted time and rounds, for connections and buffers.
WARM_UP_SECONDS = 1.0
WARM_UP_ROUNDS = 3


@dataclass(frozen=True)
class Options:
    """Command-line options of a peer's script."""

    size_mb: int
    workers: int
    seconds: float
    shared: bool
    join: str

    @property
    def floats(self) -> int:
        """Length of the float32 vector."""
        return self.size_mb * (1 << 20) // 4


def options(description: str) -> Options:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--size-mb", type=int, default=64, help="MiB of the model, as float32")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="measured after the warm-up")
    parser.add_argument("--shared", action="store_true", help="Ray only: all on one node")
    parser.add_argument("--join", default="", help=argparse.SUPPRESS)
    return Options(**vars(parser.parse_args()))


@contextmanager
def others(opts: Options, script: str, address: str, number: int) -> Iterator[None]:
    """Run ``number`` processes of the same script with ``--join``, and kill them at the end."""
    argv = [sys.executable, script, "--size-mb", str(opts.size_mb), "--join", address,
            "--workers", str(opts.workers)]  # fmt: skip
    processes = [subprocess.Popen(argv, start_new_session=True) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            # The group includes all processes that it started.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def loopback_bytes() -> int:
    """Return the bytes that this machine's loopback interface has carried."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            return int(rest.split()[0])
    return 0


@dataclass
class Count:
    """Number of updates and bytes over the loopback interface at a moment."""

    done: int
    at: float
    bytes: int

    @classmethod
    def of(cls, done: int, at: float | None = None) -> Count:
        return cls(done, time.monotonic() if at is None else at, loopback_bytes())


def measure(
    turn: Callable[[], object], counted: Callable[[], Count], seconds: float
) -> dict[str, Any]:
    """Call ``turn`` for the warm-up and then for ``seconds``, and return the rate."""
    started, turns = time.monotonic(), 0
    while turns < WARM_UP_ROUNDS or time.monotonic() < started + WARM_UP_SECONDS:
        turn()
        turns += 1
    first = counted()
    while time.monotonic() < first.at + seconds:
        turn()
    return rate(first, counted())


def rate(first: Count, last: Count) -> dict[str, Any]:
    updates = last.done - first.done
    return {
        "updates": updates,
        "updates_per_s": updates / (last.at - first.at),
        "loopback_bytes_per_update": (last.bytes - first.bytes) / max(1, updates),
    }


def show(figures: dict[str, Any], packages: list[str], **notes: Any) -> None:
    """Print the result as one line of JSON."""
    versions = {name: version(name) for name in packages}
    print(json.dumps({**figures, "versions": versions, "notes": notes}), flush=True)
