"""Local steps by speed, so that fast and slow workers push at the same rate.

Asynchronous Local-SGD (Liu 2024, arXiv 2401.09135, "dynamic local updates"): a worker whose local
step takes ``t`` seconds makes ``H·t_min/t`` of them between two pushes, where the fastest makes H.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

#: the shortest interval, as a share of the longest: a worker so slow pushes less often than the
#: others, rather than after every step; and one that tells tales can't shorten all to nothing
LEAST_SHARE = 1 / 16
#: by what a share has to change to be told anew, relative to the one that holds: the time of a
#: step varies by a few per cent from one interval to the next
CHANGE = 0.15


def shares_by_speed(seconds: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """The share in (0, 1] of the push interval that each worker makes.

    ``seconds``: of a local step, by worker; those that are no number above 0 are left out, and so
    is their worker. ``before``: the shares that hold now; 1 where none is known.
    """
    known = {name: value for name, value in seconds.items() if isfinite(value) and value > 0}
    fastest = min(known.values(), default=0.0)
    return {
        name: _settled(max(LEAST_SHARE, fastest / value), before.get(name, 1.0))
        for name, value in known.items()
    }


def local_steps(interval: int, share: float) -> int:
    """Of an interval of so many local steps, at least 1."""
    return max(1, round(interval * min(share, 1.0)))


def _settled(share: float, before: float) -> float:
    return before if abs(share - before) <= CHANGE * before else share
