"""Evaluations of a job in the ledger: open, leased, and done."""

from __future__ import annotations

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.job import as_count
from vcasgd.store.ledger.leases import WorkKind


class Evaluations:
    """Calls raise :class:`~vcasgd.errors.StoreUnavailable` and can be repeated."""

    def __init__(self, ledger: RedisClient, job: str) -> None:
        self._ledger = ledger
        self._keys = LedgerKeys(job)

    def read(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the numbers of pending evaluations, which are open or leased, and of done ones."""
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.zrange(self._keys.open, 0, -1)
            pipe.zrange(self._keys.leases, 0, -1)
            pipe.hkeys(self._keys.evaluations)
            waiting, leased, done = pipe.execute()
        pieces = [piece.partition(b":") for piece in (*waiting, *leased)]
        kind = WorkKind.EVALUATE.encode()
        pending = frozenset(as_count(number) for name, _, number in pieces if name == kind)
        return pending, frozenset(map(as_count, done))

    def open(self, number: int, at: float) -> None:
        """Open an evaluation of the present model. ``at`` is the Unix time."""
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.hset(self._keys.work, "evaluation_at", str(at))
            pipe.zadd(self._keys.open, {f"{WorkKind.EVALUATE}:{number}": -1}, nx=True)
            pipe.execute()

    def opened_at(self) -> float | None:
        """Return the time of the last :meth:`open`, or None."""
        at = self._ledger.hget(self._keys.work, "evaluation_at")
        return float(at) if at else None
