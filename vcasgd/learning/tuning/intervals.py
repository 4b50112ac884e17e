"""Local steps by speed, so that fast and slow workers push at the same rate.

Asynchronous Local-SGD (Liu 2024, arXiv 2401.09135, "dynamic local updates"): a worker whose local
step takes ``t`` seconds makes ``H·t_min/t`` steps between two pushes; the fastest worker makes H.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

#: The shortest interval as a share of the longest. A slower worker pushes less often instead of
#: after every step, and a worker that reports a wrong speed can't shorten all intervals to nothing.
MIN_SHARE = 1 / 16
#: Relative change that replaces a share; the duration of a step varies by a few percent.
CHANGE = 0.15


def shares_by_speed(seconds: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Return each worker's share of the push interval, in (0, 1].

    ``seconds`` is the duration of a local step of each worker; a worker without a finite number
    above 0 is left out. ``before`` has the current shares; a missing one is 1.
    """
    durations = {name: value for name, value in seconds.items() if isfinite(value) and value > 0}
    fastest = min(durations.values(), default=0.0)
    return {
        name: _smoothed(max(MIN_SHARE, fastest / value), before.get(name, 1.0))
        for name, value in durations.items()
    }


def local_steps(interval: int, share: float) -> int:
    """Return the local steps of a share of an interval, at least 1."""
    return max(1, round(interval * min(share, 1.0)))


def _smoothed(share: float, before: float) -> float:
    return before if abs(share - before) <= CHANGE * before else share
