"""Exponential back-off: how long to wait before the next attempt. Pure: no clock, no sleep."""

from __future__ import annotations

import random

#: After this many doublings, every delay has reached its limit.
_MAX_DOUBLINGS = 30


def backoff(failures: int, first: float, limit: float) -> float:
    """Return the seconds to wait after ``failures`` failures in a row.

    The delays are ``first``, 2·``first``, 4·``first``, …, ``limit``; 0 after no failure.
    """
    if failures <= 0:
        return 0.0
    return float(min(limit, first * 2 ** min(failures - 1, _MAX_DOUBLINGS)))


def jittered(seconds: float) -> float:
    """Return half to all of ``seconds``, so that many clients do not retry at the same moment."""
    return seconds * random.uniform(0.5, 1.0)
