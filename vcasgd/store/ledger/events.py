"""History of jobs in the ledger: events, metrics, log lines, and timelines of machines."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vcasgd.errors import StoreFull
from vcasgd.limits import LOG_LINES_KEPT
from vcasgd.logging import request_id
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.untrusted import LogLevel, log_entry

log = logging.getLogger(__name__)

#: Entries that a writer leaves in each stream.
EVENTS_KEPT = 20_000
METRICS_KEPT = 20_000
#: Largest part of a stream ID, which has 64 bits. A client can send any number.
LARGEST_NUMBER = 2**64 - 1
#: After the names of all jobs.
LAST_JOB = "~"
#: Entries per read; the ledger is single-threaded, and leases must not wait long.
BATCH = 2000


@dataclass(frozen=True)
class NewEvent:
    """Event to append to a job's history; see :meth:`EventLog.event`."""

    job: str
    kind: str
    text: str
    details: Mapping[str, Any]


@dataclass(frozen=True)
class NewLine:
    """Line to append to a job's log. ``at``: Unix seconds."""

    at: float
    level: LogLevel
    text: str


class EventLog:
    """The history of every job. Calls raise :class:`~vcasgd.errors.StoreUnavailable`.

    At the ledger's memory limit, events and points are dropped, so that jobs continue.
    """

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger
        self._announce = ledger.script("ledger/announce")

    def event(self, job: str, kind: str, text: str, **details: Any) -> None:
        """Append an event. ``kind`` is short and stable; ``text`` is for people."""
        self.add_events([NewEvent(job, kind, text, details)])

    def add_events(self, events: Sequence[NewEvent]) -> None:
        """Append several events, in order, in two round trips."""
        requests = self.requests_of({each.job for each in events})
        with self._ledger.pipeline() as pipe:
            for each in events:
                text = event_text(each.kind, each.text, each.details, requests[each.job])
                key = LedgerKeys(each.job).events
                pipe.xadd(key, {"e": text}, maxlen=EVENTS_KEPT, approximate=True)
            with _dropped_when_full("events"):
                pipe.execute()

    def announce(self, job: str, name: str, kind: str, text: str, **details: Any) -> bool:
        """Append an event unless one with this ``name`` was announced before; then return False."""
        keys, event = LedgerKeys(job), event_text(kind, text, details, self.request_of(job))
        added = 0
        with _dropped_when_full("events"):
            added = self._announce(keys=[keys.announced, keys.events], args=[name, event])
        return bool(added)

    def requests_of(self, jobs: Collection[str]) -> dict[str, str | None]:
        """Return the ID of the current request, else of the one that submitted each job."""
        if (current := request_id()) is not None:
            return dict.fromkeys(jobs, current)
        values = self._ledger.of_each("HGET", (LedgerKeys(job).record for job in jobs), "request")
        return {
            job: value.decode() if value else None for job, value in zip(jobs, values, strict=True)
        }

    def request_of(self, job: str) -> str | None:
        """Return the ID of the current request, else of the one that submitted the job."""
        return self.requests_of([job])[job]

    def events(self, job: str, after: str = "0", *, limit: int = 1000) -> list[dict[str, Any]]:
        """Return events after an ID, oldest first."""
        entries = self._read(LedgerKeys(job).events, after, limit)
        return [_event(at, fields) for at, fields in entries]

    def metrics(self, job: str, after: str = "0", *, limit: int = 5000) -> list[dict[str, Any]]:
        """Return points of the totals over time, oldest first."""
        entries = self._read(LedgerKeys(job).metrics, after, limit)
        return [{"id": at.decode(), **json.loads(fields[b"m"])} for at, fields in entries]

    def newest_losses(self, jobs: Sequence[str]) -> dict[str, float | None]:
        """Return the loss of the newest point of each job, None without one, in one round trip."""
        with self._ledger.pipeline() as pipe:
            for job in jobs:
                pipe.xrevrange(LedgerKeys(job).metrics, count=1)
            newest = pipe.execute()
        points = (json.loads(entries[0][1][b"m"]) if entries else {} for entries in newest)
        return {job: point.get("loss") for job, point in zip(jobs, points, strict=True)}

    def add_metrics(self, job: str, values: Mapping[str, Any]) -> None:
        """Append a point of the totals."""
        key, entry = LedgerKeys(job).metrics, json.dumps(values)
        with _dropped_when_full("points"):
            self._ledger.xadd(key, {"m": entry}, maxlen=METRICS_KEPT, approximate=True)

    def logs(self, job: str, after: str = "0", *, limit: int = 1000) -> list[dict[str, Any]]:
        """Return lines that workers printed, oldest first: ``worker``, ``at``, ``level``,
        ``line``.
        """
        entries = self._read(LedgerKeys(job).logs, after, limit)
        return [log_entry(at, fields) for at, fields in entries]

    def logs_before(
        self, job: str, before: str = "+", *, limit: int = 1000
    ) -> list[dict[str, Any]]:
        """Return lines before an ID, newest first."""
        end = before if before == "+" else f"({before}"
        entries = self._ledger.xrevrange(LedgerKeys(job).logs, end, "-", count=limit)
        return [log_entry(at, fields) for at, fields in entries]

    def add_logs(self, job: str, worker: str, lines: Iterable[NewLine]) -> None:
        """Append lines of a worker. Raises :class:`~vcasgd.errors.StoreFull`."""
        with self._ledger.pipeline() as pipe:
            for line in lines:
                row = {"worker": worker, "at": line.at, "level": line.level, "line": line.text}
                entry = json.dumps(row, ensure_ascii=False)
                pipe.xadd(LedgerKeys(job).logs, {"l": entry}, maxlen=LOG_LINES_KEPT)
            pipe.execute()

    def _read(self, key: str, after: str, limit: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        streams = self._ledger.xread({key: after}, count=limit)
        return list(streams[0][1]) if streams else []

    def timelines(self, job: str) -> dict[str, dict[str, Any]]:
        """Return what each machine did for a job.

        A timeline is plain data of :mod:`vcasgd.controller.fleet.machine_timeline`.
        """
        rows = self._ledger.hgetall(LedgerKeys(job).machines)
        return {machine.decode(): json.loads(row) for machine, row in rows.items()}

    def update_timelines(
        self,
        changed: Mapping[str, Mapping[str, Mapping[str, Any]]],
        removed: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """Replace some timelines of each job and remove others, in one round trip."""
        with self._ledger.pipeline() as pipe:
            for job, rows in changed.items():
                if rows:
                    texts = {name: json.dumps(row) for name, row in rows.items()}
                    pipe.hset(LedgerKeys(job).machines, mapping=texts)
            for job, names in removed.items():
                if names:
                    pipe.hdel(LedgerKeys(job).machines, *names)
            pipe.execute()


@dataclass(frozen=True, order=True)
class EventCursor:
    """Position in the events of all jobs: the ledger's clock in ms, a number, and the job."""

    ms: int
    number: int = 0
    job: str = ""

    @classmethod
    def parse(cls, text: str) -> EventCursor:
        """Return the cursor with this text. Raises :class:`ValueError`."""
        at, _, job = text.partition("/")
        ms, _, number = at.partition("-")
        return cls(min(int(ms), LARGEST_NUMBER), min(int(number or 0), LARGEST_NUMBER), job)

    def __str__(self) -> str:
        return f"{self.ms}-{self.number}/{self.job}"

    def start_for(self, job: str) -> str:
        """Return the start of ``XRANGE`` for a job's events after this position."""
        included = job > self.job
        return f"{self.ms}-{self.number}" if included else f"({self.ms}-{self.number}"


class EventFeed:
    """Events of many jobs in one order, which a client can resume at a cursor."""

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger

    def now(self) -> int:
        """Return the ledger's clock, in ms."""
        return int(self._ledger.now() * 1000)

    def events(
        self, jobs: Collection[str], after: EventCursor, until: int, *, limit: int
    ) -> list[tuple[EventCursor, dict[str, Any]]]:
        """Return the events of ``jobs`` after a cursor and before ``until``, in order.

        ``until`` is a time of the ledger in ms. Each event has its ``job``.
        """
        if not jobs or until <= after.ms:
            return []
        with self._ledger.pipeline() as pipe:
            for job in jobs:
                pipe.xrange(LedgerKeys(job).events, after.start_for(job), until - 1, count=limit)
            streams = pipe.execute()
        events = [
            (
                EventCursor.parse(f"{at.decode()}/{job}"),
                {"job": job, **_event(at, fields)},
            )
            for job, entries in zip(jobs, streams, strict=True)
            for at, fields in entries
        ]
        return sorted(events, key=lambda pair: pair[0])[:limit]


@contextmanager
def _dropped_when_full(what: str) -> Iterator[None]:
    try:
        yield
    except StoreFull as error:
        log.warning("%s are dropped: %s", what, error)


def _event(at: bytes, fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    return {"id": at.decode(), "request": None, **json.loads(fields[b"e"])}


def event_text(kind: str, text: str, details: Mapping[str, Any], request: str | None) -> str:
    """Return an event as it is stored, with the current time."""
    event = {"at": time.time(), "kind": kind, "text": text, "details": details, "request": request}
    return json.dumps(event)


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
        position = position_of(entry)
        return [row for row in self.rows if position_of(row["id"]) > position]

    @property
    def _last(self) -> str:
        return str(self.rows[-1]["id"]) if self.rows else "0-0"


def position_of(entry: str) -> tuple[int, int]:
    """Return the time in ms and the number of the ID of a stream's entry."""
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
    for number in range(stretches):
        stretch = range(count * number // stretches, count * (number + 1) // stretches)
        for name in names:
            known = [(value, at) for at in stretch if _is_number(value := rows[at].get(name))]
            if known:
                indices |= {min(known)[1], max(known)[1]}
    return [rows[index] for index in sorted(indices)[:most]]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and value == value
