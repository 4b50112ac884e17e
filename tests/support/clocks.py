"""Servers whose wall clock a test can set, as an administrator or NTP does.

libfaketime changes what the C library says the time is; the monotonic clock stays right.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.harness import RedisServer

_LIBRARY = "faketime/libfaketimeMT.so.1"


class SteppingServer(RedisServer):
    """A server with a wall clock of its own. Skips the test without libfaketime, but not in CI."""

    def __init__(self, directory: Path, *, durable: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._offset = directory / "clock"
        self.set_clock(0)
        env = {
            "LD_PRELOAD": str(_library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._offset),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }
        super().__init__(directory, durable=durable, env=env)

    def set_clock(self, seconds: int) -> None:
        """Set the clock to so many seconds after the true time."""
        new = self._offset.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.rename(self._offset)


def _library() -> Path:
    for folder in Path("/usr/lib").glob("*"):
        if (folder / _LIBRARY).exists():
            return folder / _LIBRARY
    reason = "libfaketime is not installed (Debian: apt install faketime)"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
