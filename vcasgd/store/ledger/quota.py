"""Memory that a job's workers may occupy in the ledger.

Workers write heartbeats, results, and log lines directly, so a hostile one can write any
amount of them. Readers hold each kind in memory at once.
"""

from __future__ import annotations

import time

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys

#: Bytes of each kind, several times what 10,000 honest workers and full streams need.
MOST_BYTES = 64 << 20
#: Bytes of kinds with an entry for each subtask, of which a job may have millions.
MOST_SUBTASK_BYTES = 512 << 20
#: Entries of those that are measured; the others are extrapolated.
SAMPLES = 1000


class Quota:
    """Quota of one job, which is checked every ``period`` seconds."""

    def __init__(self, ledger: RedisClient, job: str, period: float = 0.0) -> None:
        keys = LedgerKeys(job)
        self._ledger = ledger
        self._period = period
        self._checked_at = float("-inf")
        self._small = (keys.facts, keys.workers, keys.beats, keys.evaluations, keys.refused,
                       keys.failures, keys.logs, keys.secret_requests)  # fmt: skip
        self._large = (keys.leases, keys.holders, keys.open, keys.counters)

    def enforce(self) -> str | None:
        """Delete what exceeds the quota, and return why the job has to end; None if nothing does.

        Raises :class:`~vcasgd.errors.StoreUnavailable`. Measuring 10,000 entries takes the ledger
        about a millisecond.
        """
        if time.monotonic() - self._checked_at < self._period:
            return None
        self._checked_at = time.monotonic()
        with self._ledger.pipeline() as pipe:
            for key in self._small:
                pipe.memory_usage(key, samples=0)
            for key in self._large:
                pipe.memory_usage(key, samples=SAMPLES)
            sizes = dict(zip((*self._small, *self._large), pipe.execute(), strict=True))
        excess = {key: size for key, size in sizes.items() if (size or 0) > self._most(key)}
        if not excess:
            return None
        self._ledger.unlink(*excess)
        key, size = next(iter(excess.items()))
        name, limit = key.rpartition(":")[2], self._most(key) >> 20
        return f"the job's workers wrote {size >> 20} MiB of {name}, at most {limit} are allowed"

    def _most(self, key: str) -> int:
        return MOST_BYTES if key in self._small else MOST_SUBTASK_BYTES
