"""Server-sent events: a job's history as it happens."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
from anyio import CapacityLimiter, to_thread
from fastapi import Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from vcasgd.api.rows import finite
from vcasgd.errors import VcasgdError
from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.jobs import Jobs

log = logging.getLogger(__name__)

MEDIA_TYPE = "text/event-stream"
#: between two looks for news. A blocking read of the ledger would be quicker by half of this,
#: and hold a thread and a connection for each reader
LOOK_SECONDS = 0.25
#: entries sent between two looks
BATCH = 500
#: a proxy closes connections that are silent for long, commonly after 60 s
KEEP_ALIVE_SECONDS = 10
#: a reader that takes nothing for so long is disconnected
SEND_SECONDS = 30
#: streams have threads of their own, so that many readers don't delay everybody else
_THREADS = CapacityLimiter(16)

Entry = dict[str, Any]


class Read(Protocol):
    """Reads entries of a job's history after an id."""

    def __call__(self, job: str, after: str, *, limit: int) -> list[Entry]: ...


@dataclass(frozen=True)
class JobSnapshot:
    """Entries, and what was known of the job before they were read."""

    job: JobRecord
    entries: list[Entry]


@dataclass(frozen=True)
class Tail:
    """One kind of a job's history. ``label`` names an entry; ``late_seconds``: entries may
    come so long after the job's end."""

    jobs: Jobs
    job: str
    read: Read
    label: Callable[[Entry], str]
    late_seconds: float = 0.0

    def look(self, after: str, limit: int) -> JobSnapshot:
        """Raises :class:`~vcasgd.errors.NotFound`, :class:`~vcasgd.errors.StoreUnavailable`."""
        # in this order: what comes with the job's end is not missed
        job = self.jobs.get(self.job)
        return JobSnapshot(job, [finite(each) for each in self.read(self.job, after, limit=limit)])

    def grace(self, job: JobRecord) -> float:
        """How long entries may still come, in seconds, now that the job is over."""
        passed = time.time() - (job.ended_at or 0.0)
        # whoever ended the job may have another idea of the time
        return min(max(self.late_seconds - passed, 0.0), self.late_seconds)


async def look(tail: Tail, after: str, limit: int) -> JobSnapshot:
    """:meth:`Tail.look` in a thread that a shutdown doesn't wait for."""
    return await to_thread.run_sync(
        tail.look, after, limit, abandon_on_cancel=True, limiter=_THREADS
    )


def wants_stream(request: Request) -> bool:
    return MEDIA_TYPE in request.headers.get("accept", "")


def event_stream(tail: Tail, after: str) -> Response:
    return EventSourceResponse(
        _messages(tail, after), ping=KEEP_ALIVE_SECONDS, send_timeout=SEND_SECONDS
    )


async def _messages(tail: Tail, after: str) -> AsyncIterator[ServerSentEvent]:
    end: float | None = None
    try:
        while True:
            seen = await look(tail, after, BATCH)
            for entry in seen.entries:
                yield _message(tail, entry)
                after = entry["id"]
            if seen.entries:
                continue
            if seen.job.state.over:
                end = end or time.monotonic() + tail.grace(seen.job)
                if time.monotonic() >= end:
                    yield ServerSentEvent(event="end", data=json.dumps({"state": seen.job.state}))
                    return
            await anyio.sleep(LOOK_SECONDS)
    except VcasgdError as error:
        # the reader comes back with the last id, and is told then what is wrong
        log.warning("stream of %s: %s", tail.job, error)


def _message(tail: Tail, entry: Entry) -> ServerSentEvent:
    return ServerSentEvent(id=entry["id"], event=tail.label(entry), data=json.dumps(entry))
