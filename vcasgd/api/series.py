"""Metrics over time, thinned to fit a screen without losing spikes."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.events import MetricPoints, thinned
from vcasgd.store.ledger.job import Evaluation

#: Series whose extremes are kept by default. The others grow steadily, so any point will do.
SPIKY = ("loss", "updates_per_second", "staleness_mean", "staleness_max", "workers")
#: Jobs whose points stay in memory; 10,000 take about 15 MB.
JOBS_CACHED = 8


class Curves:
    """Cache of long series, so that many readers read each point from the ledger once.

    Threads may share it.
    """

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, tuple[MetricPoints, threading.Lock]] = OrderedDict()

    def thinned(
        self, job: str, after: str, names: Sequence[str], most: int
    ) -> list[dict[str, Any]]:
        """Return at most ``most`` points after an ID, oldest first.

        The extremes of the :data:`SPIKY` series among ``names`` are kept. Raises
        :class:`~vcasgd.errors.StoreUnavailable`.
        """
        points, lock = self._points(job)
        with lock:
            points.refresh()
            return thinned(points.after(after), [name for name in names if name in SPIKY], most)

    def _points(self, job: str) -> tuple[MetricPoints, threading.Lock]:
        with self._lock:
            entry = self._cache.setdefault(job, (MetricPoints(self._ledger, job), threading.Lock()))
            self._cache.move_to_end(job)
            while len(self._cache) > JOBS_CACHED:
                self._cache.popitem(last=False)
            return entry


def with_evaluations(
    rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Evaluation]
) -> list[dict[str, Any]]:
    """Return the rows, each with the newest evaluation at its time."""
    ordered = sorted(evaluations, key=lambda each: each.at)
    times = [evaluation.at for evaluation in ordered]
    result = []
    for row in rows:
        count = bisect_right(times, row.get("at") or 0.0)
        metrics = ordered[count - 1].metrics if count else None
        accuracy = metrics.get("accuracy") if metrics else None
        result.append({**row, "accuracy": accuracy, "validation": metrics})
    return result
