"""Metrics of a job as columns, read incrementally.

A hundred thousand points are 40 MB of JSON, and an open page requests them every second.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys

#: Entries per read; the ledger is single-threaded, and leases must not wait long.
BATCH = 2000

_FIRST = "0-0"


class MetricColumns:
    """All points of one job in the ledger, by column. Not thread-safe.

    ``names`` are the columns. Methods raise :class:`~vcasgd.errors.StoreUnavailable`.
    """

    def __init__(self, ledger: RedisClient, job: str, names: Sequence[str]) -> None:
        self._ledger = ledger
        self._key = LedgerKeys(job).metrics
        self._names = tuple(names)
        self._clear()

    def __len__(self) -> int:
        return len(self._ms)

    def refresh(self) -> None:
        """Read new points, and drop those that the ledger has dropped."""
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.xrange(self._key, count=1)
            pipe.xrange(self._key, self._last, self._last)
            pipe.xlen(self._key)
            oldest, newest, length = pipe.execute()
        if not newest:
            # the last point is gone: the ledger was restored to an earlier state
            self._clear()
        elif oldest:
            self._drop_before(oldest[0][0].decode())
        if len(self) > length:
            # some in between are gone: the ledger's points were thinned
            self._clear()
        while entries := self._ledger.xread({self._key: self._last}, count=BATCH):
            self._append(entries[0][1])

    def column(self, name: str) -> NDArray[np.float64]:
        """Return a column, float64 ``[points]``, with NaN for missing numbers.

        Raises :class:`KeyError` for an unknown column.
        """
        return np.array(self._columns[name])

    def times(self) -> NDArray[np.float64]:
        """Return the time of each point, float64 ``[points]``, in ms of the ledger's clock."""
        return np.array(self._ms, dtype=np.float64)

    def ids(self, indices: Iterable[int]) -> list[str]:
        """Return the IDs of some points."""
        return [self._id(index) for index in indices]

    def after(self, entry: str) -> int:
        """Return the index of the first point after an ID."""
        return int((self._older(entry) | self._same(entry)).sum())

    def rows(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return complete points with their ``id``, without those dropped in the meantime."""
        names = self.ids(indices)
        with self._ledger.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.xrange(self._key, name, name)
            replies = pipe.execute()
        return [
            {"id": at.decode(), **json.loads(fields[b"m"])}
            for entries in replies
            for at, fields in entries
        ]

    @property
    def _last(self) -> str:
        return self._id(-1) if self._ms else _FIRST

    def _id(self, index: int) -> str:
        return f"{self._ms[index]}-{self._numbers[index]}"

    def _clear(self) -> None:
        self._ms, self._numbers = array("Q"), array("Q")
        self._columns = {name: array("d") for name in self._names}

    def _drop_before(self, entry: str) -> None:
        if len(self) and self._id(0) != entry:
            count = int(self._older(entry).sum())
            del self._ms[:count], self._numbers[:count]
            for column in self._columns.values():
                del column[:count]

    def _older(self, entry: str) -> NDArray[np.bool_]:
        ms, number = _parts(entry)
        times = np.array(self._ms)
        older: NDArray[np.bool_] = (times < ms) | (
            (times == ms) & (np.array(self._numbers) < number)
        )
        return older

    def _same(self, entry: str) -> NDArray[np.bool_]:
        ms, number = _parts(entry)
        same: NDArray[np.bool_] = (np.array(self._ms) == ms) & (np.array(self._numbers) == number)
        return same

    def _append(self, entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> None:
        for at, fields in entries:
            ms, number = _parts(at.decode())
            point = json.loads(fields[b"m"])
            self._ms.append(ms)
            self._numbers.append(number)
            for name, column in self._columns.items():
                column.append(_number(point.get(name)))


def _parts(entry: str) -> tuple[int, int]:
    ms, _, number = entry.partition("-")
    largest = 2**64 - 1
    return min(int(ms), largest), min(int(number or 0), largest)


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:
        return float("nan")
