"""Back-off of the weight of updates while validation worsens, and its way back.

A function of the evaluations alone, which the ledger keeps: who starts anew comes to the same
factor.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

#: evaluations in a row below the best one: one alone is noise
PATIENCE = 2
#: by how much less weight at a time, and by how much more after each evaluation that is the best
#: so far, in halves of a factor 2: down by 1/2, up by √2, so that the way back is the slower one
DOWN, UP = 2, 1
#: the least weight is 2⁻⁴
MOST_DOWN = 8


def factor_after(qualities: Iterable[float]) -> float:
    """By what the weight of updates is multiplied after evaluations of such qualities, oldest
    first: in [1/16, 1]. What is not finite counts as worse than anything."""
    best, worse, down = float("-inf"), 0, 0
    for quality in qualities:
        if not isfinite(quality) or quality < best:
            worse += 1
        elif quality > best:
            best, worse, down = quality, 0, max(0, down - UP)
        if worse == PATIENCE:
            worse, down = 0, min(MOST_DOWN, down + DOWN)
    return float(2 ** (-down / 2))
