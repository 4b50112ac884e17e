"""Unix time that does not jump when the machine's clock is set."""

from __future__ import annotations

import time

_START = time.time() - time.monotonic()


def steady_time() -> float:
    """Return the Unix time, in seconds, as the clock had it when the process started.

    It advances with the monotonic clock. So durations between two calls are right, and a deadline
    that has passed stays in the past, whatever happens to the clock.
    """
    return _START + time.monotonic()
