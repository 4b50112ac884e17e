"""Server-sent events, and a job's history as a stream while it grows."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import anyio
from anyio import CapacityLimiter, to_thread
from fastapi import Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from vcasgd.api.middleware import AS_STREAM
from vcasgd.errors import VcasgdError
from vcasgd.limits import MAX_UNREAD_SECONDS
from vcasgd.schemas.base import finite
from vcasgd.store.ledger.job import JobRecord
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
#: Returns False once the reader's token or session is no longer valid; the stream then ends.
StillValid = Callable[[], Awaitable[bool]]


def accepts_stream(request: Request) -> bool:
    """Return True if the client asks for server-sent events."""
    return MEDIA_TYPE in request.headers.get("accept", "")


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


class Read(Protocol):
    """Reader of the entries after an ID."""

    def __call__(self, job: str, after: str, *, limit: int) -> list[Entry]: ...


@dataclass(frozen=True)
class Tail:
    """The end of one kind of a job's history."""

    jobs: Jobs
    job: str
    read: Read
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
        return job, [finite(each) for each in self.read(self.job, after, limit=limit)]

    def grace(self, job: JobRecord) -> float:
        """Return the seconds in which entries of a job that has ended may still arrive."""
        passed = time.time() - (job.ended_at or 0.0)
        # clocks differ, so the end may seem to be in the future
        return min(max(self.late_seconds - passed, 0.0), self.late_seconds)


def history_stream(tail: Tail, after: str, valid: StillValid) -> Response:
    """Return a stream of the entries after an ID, until the job has ended."""
    return stream_of(_history(tail, after, valid))


async def _history(
    tail: Tail, after: str, valid: StillValid
) -> AsyncGenerator[ServerSentEvent, None]:
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
