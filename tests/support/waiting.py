"""Wait for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Seconds after which a wait fails. A wait that succeeds returns at once, so this is generous
#: enough for the slowest machine. Benchmarks measure delays; tests don't.
PATIENCE = 240.0


def await_truth(predicate: Callable[[], T], timeout: float = PATIENCE, interval: float = 0.02) -> T:
    """Return the first true value of ``predicate``; fail the test if there is none in time."""
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: last value {value!r}")
        time.sleep(interval)
    return value
