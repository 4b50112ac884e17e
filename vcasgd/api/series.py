"""Long series made short enough for a screen, so that no spike is lost: pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vcasgd.store.ledger.job import Evaluation

#: series whose highest and lowest points are kept unless others are asked for; the rest grows
#: steadily, and is right wherever it is cut
SPIKY = ("loss", "updates_per_second", "staleness_mean", "staleness_max", "workers")


def chosen(series: Sequence[NDArray[np.float64]], count: int, most: int) -> list[int]:
    """Indices of at most ``most`` of ``count`` points, in order: the first, the last, and of each
    stretch those in which one of the series is highest or lowest. Each series is float64 [count],
    NaN where it has no number."""
    if count <= most:
        return list(range(count))
    kept = {0, count - 1}
    series = series[: max(1, (most - 2) // 2)]
    stretches = max(1, (most - len(kept)) // max(1, 2 * len(series)))
    edges = np.linspace(0, count, stretches + 1).astype(int)
    for values in series:
        kept |= _extremes(values, edges)
    return sorted(kept)[:most]


def _extremes(values: NDArray[np.float64], edges: NDArray[np.int_]) -> set[int]:
    """The indices of the highest and the lowest value of each stretch."""
    found = set()
    low = np.where(np.isnan(values), np.inf, values)
    high = np.where(np.isnan(values), -np.inf, values)
    for start, stop in pairwise(edges):
        if start < stop:
            found |= {int(start + low[start:stop].argmin()), int(start + high[start:stop].argmax())}
    return found


def with_evaluations(
    rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Evaluation]
) -> list[dict[str, Any]]:
    """The rows, each with what was known of the model's quality then."""
    known = sorted(evaluations, key=lambda each: each.at)
    times = [each.at for each in known]
    after = []
    for row in rows:
        before = bisect_right(times, row.get("at") or 0.0)
        metrics = known[before - 1].metrics if before else None
        accuracy = metrics.get("accuracy") if metrics else None
        after.append({**row, "accuracy": accuracy, "validation": metrics})
    return after


def only(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The row's time, and what was asked for."""
    return {name: row.get(name) for name in ("id", "at", *names)}
