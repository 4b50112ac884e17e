"""Waiting for a state of the world, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def await_truth(predicate: Callable[[], T], timeout: float = 10.0, interval: float = 0.02) -> T:
    """The first true value of ``predicate``; fails the test if there is none in time."""
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: last value {value!r}")
        time.sleep(interval)
    return value
