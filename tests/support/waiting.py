"""Wait for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Seconds after which a wait fails. A wait that succeeds returns at once, so this is generous
#: enough for the slowest machine. Benchmarks measure delays; tests don't.
PATIENCE = 240.0
#: Seconds between two looks at first and at most, and the factor from one to the next. A look may
#: be a request to an API, so looks that are always this frequent would keep a processor busy.
FIRST, MOST, GROWTH = 0.02, 0.2, 1.1


def await_truth(
    predicate: Callable[[], T], timeout: float = PATIENCE, interval: float | None = None
) -> T:
    """Return the first true value of ``predicate``; fail the test if there is none in time.

    ``interval``: seconds between two looks; by default, they become less frequent.
    """
    deadline = time.monotonic() + timeout
    pause, most = (FIRST, MOST) if interval is None else (interval, interval)
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: last value {value!r}")
        time.sleep(pause)
        pause = min(GROWTH * pause, most)
    return value
