"""A job's history: as a stream while it grows, and as curves that fit a screen."""

from __future__ import annotations

import json
import logging
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from anyio import CapacityLimiter, to_thread
from fastapi import Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from vcasgd.api.middleware import AS_STREAM
from vcasgd.errors import VcasgdError
from vcasgd.limits import MAX_UNREAD_SECONDS
from vcasgd.schemas.base import finite
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.events import MetricPoints, position_of, thinned
from vcasgd.store.ledger.job import Evaluation, JobRecord
from vcasgd.store.ledger.jobs import Jobs

log = logging.getLogger(__name__)

MEDIA_TYPE = "text/event-stream"
#: Seconds between two reads of a history. A blocking read would halve the delay, but occupy a
#: thread and a connection for each client.
POLL_SECONDS = 0.25
#: Entries of a history that are read at a time.
BATCH = 500
#: Seconds between two comments; proxies commonly close connections that are silent for 60 s.
KEEP_ALIVE_SECONDS = 10
#: Streams have their own threads, so that many clients don't delay other requests.
_HISTORY_THREADS = CapacityLimiter(16)

Entry = dict[str, Any]
#: Returns False once the reader's token or sign-in is no longer valid; the stream then ends.
StillValid = Callable[[], Awaitable[bool]]


class _Stream(EventSourceResponse):
    """A stream, which takes a place among its token's streams instead of its requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[AS_STREAM]()
        await super().__call__(scope, receive, send)


def stream_of(
    messages: AsyncGenerator[ServerSentEvent, None] | AsyncGenerator[bytes, None],
) -> Response:
    """Return a response of messages, which ends when the ledger is unavailable.

    The client then reconnects with the last ID, and gets the error as a response.
    """
    return _Stream(
        _until_outage(messages), ping=KEEP_ALIVE_SECONDS, send_timeout=MAX_UNREAD_SECONDS
    )


async def _until_outage(messages: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
    try:
        async with aclosing(messages):
            async for message in messages:
                yield message
    except VcasgdError as error:
        log.warning("stream: %s", error)


# -- a job's history ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Tail:
    """The end of one kind of a job's history."""

    jobs: Jobs
    job: str
    #: Returns at most ``limit`` entries of a job after an ID.
    read: Callable[..., list[Entry]]
    #: Returns the type of the message for an entry.
    label: Callable[[Entry], str]
    #: Seconds after the job's end in which entries may still arrive.
    late_seconds: float = 0.0

    async def after(self, after: str, limit: int) -> tuple[JobRecord, list[Entry]]:
        """Return the job, and the entries after an ID.

        Raises :class:`~vcasgd.errors.NotFound` and :class:`~vcasgd.errors.StoreUnavailable`.
        """
        read = partial(self._after, after, limit)
        return await to_thread.run_sync(read, abandon_on_cancel=True, limiter=_HISTORY_THREADS)

    def _after(self, after: str, limit: int) -> tuple[JobRecord, list[Entry]]:
        # read the job first: an entry that arrives with the job's end is then included
        job = self.jobs.get(self.job)
        return job, [finite(entry) for entry in self.read(self.job, after, limit=limit)]

    def grace(self, job: JobRecord) -> float:
        """Return the seconds in which entries of a job that has ended may still arrive."""
        passed = time.time() - (job.ended_at or 0.0)
        # clocks differ, so the end may seem to be in the future
        return min(max(self.late_seconds - passed, 0.0), self.late_seconds)


async def history(
    tail: Tail, after: str, valid: StillValid
) -> AsyncGenerator[ServerSentEvent, None]:
    """Yield the entries after an ID, until the job has ended."""
    end: float | None = None
    while await valid():
        job, entries = await tail.after(after, BATCH)
        for entry in entries:
            after = entry["id"]
            yield ServerSentEvent(id=after, event=tail.label(entry), data=json.dumps(entry))
        if entries:
            continue
        if job.state.over:
            end = end or time.monotonic() + tail.grace(job)
            if time.monotonic() >= end:
                yield ServerSentEvent(event="end", data=json.dumps({"state": job.state}))
                return
        await anyio.sleep(POLL_SECONDS)


# -- lines of a log that a reader asks for ----------------------------------------------------

#: Lines of a log that are read at a time, because a filter leaves most of them out.
LINES_BATCH = 1000
_LARGEST = 2**64 - 1


@dataclass
class LogReader:
    """Reads the matching lines of one job, and remembers how far it has read.

    ``worker`` is a part of a name, ``text`` is compared without case. Methods raise
    :class:`~vcasgd.errors.StoreUnavailable`.
    """

    jobs: Jobs
    worker: str
    text: str
    _read: str = field(default="0", init=False)

    def __call__(self, job: str, after: str, *, limit: int) -> list[dict[str, Any]]:
        """Return at most ``limit`` matching lines after an ID, oldest first."""
        at = max(after, self._read, key=position_of)
        found: list[dict[str, Any]] = []
        while len(found) < limit:
            lines = self.jobs.logs(job, at, limit=LINES_BATCH)
            for line in lines:
                at = line["id"]
                if self._matches(line):
                    found.append(line)
                    if len(found) == limit:
                        break
            if len(lines) < LINES_BATCH:
                break
        self._read = at
        return found

    def before_last(self, job: str, number: int) -> str:
        """Return the ID after which there are the last ``number`` matching lines."""
        before, left = "+", number
        while lines := self.jobs.logs_before(job, before, limit=LINES_BATCH):
            for line in lines:
                before = line["id"]
                left -= self._matches(line)
                if left == 0:
                    return _just_before(before)
        return "0"

    def _matches(self, line: dict[str, Any]) -> bool:
        if self.worker not in line["worker"]:
            return False
        return not self.text or self.text.casefold() in line["line"].casefold()


def first_after(seconds: float) -> str:
    """Return the ID after which entries were written at or after a time, in Unix seconds."""
    return f"{max(0, int(seconds * 1000) - 1)}-{_LARGEST}"


def _just_before(entry: str) -> str:
    ms, number = position_of(entry)
    return f"{ms}-{number - 1}" if number else f"{ms - 1}-{_LARGEST}"


# -- curves --------------------------------------------------------------------------------------

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
    ordered = sorted(evaluations, key=lambda evaluation: evaluation.at)
    times = [evaluation.at for evaluation in ordered]
    result = []
    for row in rows:
        count = bisect_right(times, row.get("at") or 0.0)
        metrics = ordered[count - 1].metrics if count else None
        accuracy = metrics.get("accuracy") if metrics else None
        result.append({**row, "accuracy": accuracy, "validation": metrics})
    return result
