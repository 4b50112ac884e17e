"""Choice of the points of a series that stay when there are too many."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def thinned_indices(
    series: Sequence[NDArray[np.float64]],
    count: int,
    most: int,
    times: NDArray[np.float64] | None = None,
) -> list[int]:
    """Return the indices of at most ``most`` of ``count`` points, in order.

    They include the first point, the last one, and the extremes of each series in each of
    several equal stretches. Each series is float64 [count], NaN where it has no value. Stretches
    have the same number of points or, with ``times`` (float64 [count], ascending), the same length.
    """
    if count <= most:
        return list(range(count))
    indices = {0, count - 1}
    series = series[: max(1, (most - 2) // 2)]
    stretches = max(1, (most - len(indices)) // max(1, 2 * len(series)))
    edges = np.linspace(0, count, stretches + 1).astype(int)
    if times is not None:
        inner = np.linspace(times[0], times[-1], stretches + 1)[1:-1]
        edges = np.concatenate(([0], np.searchsorted(times, inner), [count]))
    for values in series:
        indices |= _extremes(values, edges)
    return sorted(indices)[:most]


def _extremes(values: NDArray[np.float64], edges: NDArray[np.int_]) -> set[int]:
    """Return the indices of the highest and the lowest value of each stretch."""
    indices = set()
    low = np.where(np.isnan(values), np.inf, values)
    high = np.where(np.isnan(values), -np.inf, values)
    for start, stop in pairwise(edges):
        if start < stop:
            indices.add(int(start + low[start:stop].argmin()))
            indices.add(int(start + high[start:stop].argmax()))
    return indices
