"""Events of many jobs, in one order that can be taken up again."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys

#: a place may be anything that somebody sent; ids of a stream have 64 bits
_LARGEST = 2**64 - 1


@dataclass(frozen=True, order=True)
class EventCursor:
    """In the events of all jobs: by the ledger's clock in ms, the number within that, the job."""

    ms: int
    number: int = 0
    job: str = ""

    @classmethod
    def parse(cls, text: str) -> EventCursor:
        """From what :meth:`__str__` gave. Raises :class:`ValueError`."""
        at, _, job = text.partition("/")
        ms, _, number = at.partition("-")
        return cls(min(int(ms), _LARGEST), min(int(number or 0), _LARGEST), job)

    def __str__(self) -> str:
        return f"{self.ms}-{self.number}/{self.job}"

    def before(self, job: str) -> str:
        """The id after which a job's events come behind this place."""
        included = job > self.job
        return f"{self.ms}-{self.number}" if included else f"({self.ms}-{self.number}"


class EventFeed:
    """The histories of all jobs as one."""

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger

    def now(self) -> int:
        """The ledger's clock, in ms."""
        seconds, microseconds = self._ledger.time()
        return int(seconds * 1000 + microseconds // 1000)

    def events(
        self, jobs: Collection[str], after: EventCursor, until: int, *, limit: int
    ) -> list[tuple[EventCursor, dict[str, Any]]]:
        """Of some jobs, behind a place and before a time of the ledger, in order; each with the
        ``job`` that it is of."""
        if not jobs or until <= after.ms:
            return []
        with self._ledger.pipeline() as pipe:
            for job in jobs:
                pipe.xrange(LedgerKeys(job).events, after.before(job), until - 1, count=limit)
            found = pipe.execute()
        events = [
            (EventCursor.parse(f"{at.decode()}/{job}"), {"job": job, **_event(at, fields)})
            for job, entries in zip(jobs, found, strict=True)
            for at, fields in entries
        ]
        return sorted(events, key=lambda pair: pair[0])[:limit]


def _event(at: bytes, fields: dict[bytes, bytes]) -> dict[str, Any]:
    return {"id": at.decode(), **json.loads(fields[b"e"])}
