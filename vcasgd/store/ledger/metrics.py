"""Points of a job's curves, read incrementally, and the choice of those that a screen shows.

An open page requests them every second, and a long job has ten thousand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys

#: Entries per read; the ledger is single-threaded, and leases must not wait long.
BATCH = 2000


class MetricPoints:
    """All points of one job in the ledger, oldest first. Not thread-safe."""

    def __init__(self, ledger: RedisClient, job: str) -> None:
        self._ledger = ledger
        self._key = LedgerKeys(job).metrics
        #: The points, each with its ``id``.
        self.rows: list[dict[str, Any]] = []

    def refresh(self) -> None:
        """Read new points. Raises :class:`~vcasgd.errors.StoreUnavailable`."""
        with self._ledger.pipeline() as pipe:
            pipe.xrange(self._key, count=1)
            pipe.xrange(self._key, self._last, self._last)
            oldest, newest = pipe.execute()
        # The ledger dropped the first points, or was restored to an earlier state.
        if self.rows and (not newest or oldest[0][0].decode() != self.rows[0]["id"]):
            self.rows = []
        while entries := self._ledger.xread({self._key: self._last}, count=BATCH):
            self.rows += [
                {"id": at.decode(), **json.loads(fields[b"m"])} for at, fields in entries[0][1]
            ]

    def after(self, entry: str) -> list[dict[str, Any]]:
        """Return the points after an ID."""
        position = _position(entry)
        return [row for row in self.rows if _position(row["id"]) > position]

    @property
    def _last(self) -> str:
        return str(self.rows[-1]["id"]) if self.rows else "0-0"


def _position(entry: str) -> tuple[int, int]:
    ms, _, number = entry.partition("-")
    return int(ms), int(number or 0)


def thinned(
    rows: Sequence[dict[str, Any]], names: Sequence[str], most: int
) -> list[dict[str, Any]]:
    """Return at most ``most`` of the rows, in order.

    They include the first one, the last one, and the extremes of each series among ``names`` in
    each of several equal stretches.
    """
    count = len(rows)
    if count <= most:
        return list(rows)
    indices = {0, count - 1}
    names = names[: max(1, (most - 2) // 2)]
    stretches = max(1, (most - len(indices)) // max(1, 2 * len(names)))
    edges = np.linspace(0, count, stretches + 1).astype(int)
    for name in names:
        indices |= _extremes(np.array([_number(row.get(name)) for row in rows]), edges)
    return [rows[index] for index in sorted(indices)[:most]]


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


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:
        return float("nan")
