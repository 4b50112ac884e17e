"""Weight of updates: reduced while validation worsens, and raised again when it improves.

The factor depends only on the evaluations in the ledger, so a restarted controller computes the
same one.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite, sqrt

#: Consecutive evaluations worse than the best that reduce the weight; a single one is noise.
PATIENCE = 2
#: Changes of the weight: one reduction takes two improvements to undo, so recovery is slower.
REDUCTION, INCREASE = 1 / 2, sqrt(2)
#: The smallest factor; updates keep some weight, so that the model can recover.
LEAST = 1 / 16


def factor_after(qualities: Iterable[float]) -> float:
    """Return the factor of the weight of updates, in [1/16, 1].

    ``qualities`` are those of all evaluations, oldest first. A quality that is not finite counts
    as worse than any other.
    """
    best, worse, factor = float("-inf"), 0, 1.0
    for quality in qualities:
        if not isfinite(quality) or quality < best:
            worse += 1
        elif quality > best:
            best, worse, factor = quality, 0, min(1.0, factor * INCREASE)
        if worse == PATIENCE:
            worse, factor = 0, max(LEAST, factor * REDUCTION)
    return factor
