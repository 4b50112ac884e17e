"""Long histories for many readers: each is read from the ledger once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from vcasgd.api.series import SPIKY, chosen
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.metrics import MetricColumns

#: jobs whose columns are in memory: those that somebody looks at. 100,000 points take 6 MB each
JOBS_KEPT = 8


class _Shelf:
    """One job's points, and the lock that they need."""

    def __init__(self, points: MetricColumns) -> None:
        self.points = points
        self.lock = threading.Lock()


class Curves:
    """Points of the metrics, made few enough. May be asked by threads."""

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()

    def thinned(
        self, job: str, after: str, names: Sequence[str], most: int
    ) -> list[dict[str, Any]]:
        """At most ``most`` of the points after an id, oldest first; the highest and lowest values
        of those series in ``names`` that have spikes are among them. Raises
        :class:`~vcasgd.errors.StoreUnavailable`."""
        shelf = self._shelf(job)
        with shelf.lock:
            points = shelf.points
            points.refresh()
            first = points.after(after)
            shown = [name for name in names if name in SPIKY]
            series = [points.column(name)[first:] for name in shown]
            wanted = chosen(series, len(points) - first, most)
            return points.rows(first + index for index in wanted)

    def _shelf(self, job: str) -> _Shelf:
        with self._lock:
            shelf = self._shelves.setdefault(job, _Shelf(MetricColumns(self._ledger, job, SPIKY)))
            self._shelves.move_to_end(job)
            while len(self._shelves) > JOBS_KEPT:
                self._shelves.popitem(last=False)
            return shelf
