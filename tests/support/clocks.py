"""Processes whose wall clock a test can set, as an administrator or NTP does.

A preloaded library changes what the C library says the time is; the monotonic clock stays right.
It is libfaketime for servers. Python's ``time.sleep`` fails under that (it sleeps until a time of
the monotonic clock), so Python programs get a smaller library.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from support.harness import RedisServer

_LIBRARY = "faketime/libfaketimeMT.so.1"

_SOURCE = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const volatile long *offset;

__attribute__((constructor)) static void map_offset(void) {
    int file = open(getenv("STEPPING_CLOCK"), O_RDONLY);
    void *mapped = mmap(0, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) offset = mapped;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int result = syscall(SYS_clock_gettime, clock, time);
    if (result == 0 && clock == CLOCK_REALTIME && offset) time->tv_sec += *offset;
    return result;
}
"""


class SteppingClock:
    """The wall clock of Python programs that are started with ``env``.

    Skips the test without a C compiler, but not in CI.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        compiler = shutil.which("cc")
        if compiler is None:
            _skip("there is no C compiler (Debian: apt install gcc)")
        source, library = directory / "clock.c", directory / "clock.so"
        source.write_text(_SOURCE)
        argv = [str(compiler), "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(argv, check=True)
        self._offset = directory / "offset"
        self._offset.write_bytes(struct.pack("l", 0))
        self.env = {"LD_PRELOAD": str(library), "STEPPING_CLOCK": str(self._offset)}

    def set(self, seconds: int) -> None:
        """Set the clock to so many seconds after the true time."""
        with self._offset.open("r+b") as file:
            file.write(struct.pack("l", seconds))


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
    found = next(Path("/usr/lib").glob(f"*/{_LIBRARY}"), None)
    if found is None:
        _skip("libfaketime is not installed (Debian: apt install faketime)")
    return found


def _skip(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
