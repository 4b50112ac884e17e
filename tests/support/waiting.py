"""Wait for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from vcasgd.client.problems import may_work_later
from vcasgd.errors import ApiError

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

    An API that asks to try again later, as when its store is slow on a busy machine, has no answer
    yet. ``interval``: seconds between two looks; by default, they become less frequent.
    """
    deadline = time.monotonic() + timeout
    pause, most = (FIRST, MOST) if interval is None else (interval, interval)
    while True:
        try:
            value: T | ApiError = predicate()
        except ApiError as error:
            if not may_work_later(error):
                raise
            value = error
        if value and not isinstance(value, ApiError):
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: last value {value!r}")
        time.sleep(pause)
        pause = min(GROWTH * pause, most)
