"""What all tests share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def await_truth(predicate: Callable[[], T], timeout: float = 10.0, interval: float = 0.02) -> T:
    """The first true value of ``predicate``; fails the test if there is none in time."""
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout} s: last value {value!r}")
        time.sleep(interval)
    return value


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """``eventually(predicate, timeout)``: waits for a state of the world, with a deadline."""
    return await_truth
