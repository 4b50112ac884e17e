"""Waiting for a state of the world, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: seconds after which what a test waits for will not come any more. A wait that succeeds returns
#: at once, so this is for the slowest machine, and how soon something comes is for benchmarks
PATIENCE = 240.0


def await_truth(predicate: Callable[[], T], timeout: float = PATIENCE, interval: float = 0.02) -> T:
    """The first true value of ``predicate``; fails the test if there is none in time."""
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: last value {value!r}")
        time.sleep(interval)
    return value
