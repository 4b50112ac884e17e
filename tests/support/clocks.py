"""Processes whose wall clock a test can set, as an administrator or NTP does.

A preloaded library changes what the C library says the time is; the monotonic clock stays right.
It is not libfaketime, under which Python's ``time.sleep`` fails (it sleeps until a time of the
monotonic clock).
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from pathlib import Path
from typing import NoReturn

import pytest

from support.harness import RedisServer
from support.waiting import await_truth

#: Seconds of difference that are less than any step of a test.
_STEP = 60

_SOURCE = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
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

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    int result = syscall(SYS_gettimeofday, time, zone);
    if (result == 0 && time && offset) time->tv_sec += *offset;
    return result;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
"""


class SteppingClock:
    """The wall clock of programs that are started with ``env``.

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
    """A server with a wall clock of its own."""

    def __init__(self, directory: Path, *, durable: bool) -> None:
        self._clock = SteppingClock(directory)
        super().__init__(directory, durable=durable, env=self._clock.env)

    def set_clock(self, seconds: int) -> None:
        """Set the clock to so many seconds after the true time, and wait until it shows that.

        A server looks at its clock only now and then.
        """
        self._clock.set(seconds)
        await_truth(lambda: abs(self.connection.time()[0] - time.time() - seconds) < _STEP)


def _skip(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
