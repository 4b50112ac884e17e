"""Quota of what a job's workers write to the ledger: heartbeats, results, log lines, leases."""

from __future__ import annotations

import time

from vcasgd.limits import MAX_CONTENT_BYTES
from vcasgd.store.connection import RedisClient
from vcasgd.store.content_quota import ContentQuota
from vcasgd.store.keys import LedgerKeys


class Quota:
    """Quota of one job, which is checked every ``period`` seconds."""

    def __init__(self, ledger: RedisClient, job: str, period: float = 0.0) -> None:
        keys = LedgerKeys(job).written_by_workers
        self._content = ContentQuota(ledger, dict.fromkeys(keys, MAX_CONTENT_BYTES))
        self._period = period
        self._checked_at = float("-inf")

    def enforce(self) -> str | None:
        """Do :meth:`ContentQuota.enforce`, if it is time."""
        if time.monotonic() - self._checked_at < self._period:
            return None
        self._checked_at = time.monotonic()
        return self._content.enforce()
