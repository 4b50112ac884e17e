"""What a job leaves behind in the ledger: events, metrics, and lines that its workers printed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from vcasgd.logging import request_id
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys

#: entries kept of each stream; older ones are dropped
EVENTS_KEPT = 20_000
#: more than a day, at a point each second
METRICS_KEPT = 100_000
LOG_LINES_KEPT = 10_000


class EventLog:
    """The three streams of each job of the fleet."""

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger

    def event(self, job: str, kind: str, text: str, **details: Any) -> None:
        """Appends to the job's history. ``kind`` is short and stable, ``text`` for people."""
        self._ledger.xadd(
            LedgerKeys(job).events,
            {"e": event_text(kind, text, details, self._request(job))},
            maxlen=EVENTS_KEPT,
            approximate=True,
        )

    def _request(self, job: str) -> str | None:
        """The one at work, else the one that submitted the job."""
        if (present := request_id()) is not None:
            return present
        return self.request_of(job)

    def request_of(self, job: str) -> str | None:
        """The request that submitted a job."""
        known = self._ledger.hget(LedgerKeys(job).record, "request")
        return known.decode() if known else None

    def events(
        self, job: str, after: str = "0", *, limit: int = 1000, wait_seconds: float = 0.0
    ) -> list[dict[str, Any]]:
        """Events after an id, oldest first; waits for the first one if asked to."""
        return self._read(LedgerKeys(job).events, "e", after, limit, wait_seconds)

    def metrics(self, job: str, after: str = "0", *, limit: int = 5000) -> list[dict[str, Any]]:
        """The totals over time, oldest first."""
        return self._read(LedgerKeys(job).metrics, "m", after, limit, 0.0)

    def add_metrics(self, job: str, values: Mapping[str, Any]) -> None:
        self._ledger.xadd(
            LedgerKeys(job).metrics,
            {"m": json.dumps(values)},
            maxlen=METRICS_KEPT,
            approximate=True,
        )

    def logs(
        self, job: str, after: str = "0", *, limit: int = 1000, wait_seconds: float = 0.0
    ) -> list[dict[str, Any]]:
        """Lines that workers printed, oldest first: ``worker``, ``at``, ``line``."""
        return self._read(LedgerKeys(job).logs, "l", after, limit, wait_seconds)

    def add_logs(self, job: str, worker: str, lines: Iterable[str]) -> None:
        with self._ledger.pipeline() as pipe:
            for line in lines:
                entry = json.dumps({"worker": worker, "at": time.time(), "line": line})
                pipe.xadd(LedgerKeys(job).logs, {"l": entry}, maxlen=LOG_LINES_KEPT)
            pipe.execute()

    def _read(
        self, key: str, name: str, after: str, limit: int, wait_seconds: float
    ) -> list[dict[str, Any]]:
        # a blocking read needs an answer within the connection's own time limit
        block = min(int(wait_seconds * 1000), 5000) or None
        found = self._ledger.xread({key: after}, count=limit, block=block)
        entries = found[0][1] if found else []
        return [{"id": at.decode(), **json.loads(data[name.encode()])} for at, data in entries]


def event_text(kind: str, text: str, details: Mapping[str, Any], request: str | None) -> str:
    event = {"at": time.time(), "kind": kind, "text": text, "details": details, "request": request}
    return json.dumps(event)
