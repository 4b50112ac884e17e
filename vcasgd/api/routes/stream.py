"""Everything that changes, as one stream of server-sent events."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Annotated, Any, TypeVar

import anyio
from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, Header, Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from vcasgd.api.overview import Overview, OverviewState, Pieces, changed
from vcasgd.api.rows import finite
from vcasgd.api.services import Here
from vcasgd.api.streaming import MEDIA_TYPE, SEND_SECONDS
from vcasgd.errors import VcasgdError
from vcasgd.store.ledger.events import EventCursor, EventFeed

log = logging.getLogger(__name__)

router = APIRouter(tags=["stream"])

#: between two looks: more often than twice a second, nobody reads
LOOK_SECONDS = 0.5
#: a proxy closes connections that are silent for long
KEEP_ALIVE_SECONDS = 15
#: events that are told at one look
MOST_EVENTS = 200
#: pages that are open don't keep others from being served
_THREADS = CapacityLimiter(8)

Result = TypeVar("Result")


async def _overview(request: Request) -> Overview:
    overview: Overview = request.app.state.overview
    return overview


Shared = Annotated[Overview, Depends(_overview)]
LastPlace = Annotated[
    str | None,
    Header(
        alias="Last-Event-ID",
        pattern=r"^[0-9]{1,19}-[0-9]{1,19}(/[A-Za-z0-9._-]{0,200})?$",
        description="goes on with the events after this one",
    ),
]
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events of the types `job`, `fleet`, `store` and `event`.",
        "content": {
            MEDIA_TYPE: {
                "schema": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "string"},
                        "event": {"enum": ["job", "fleet", "store", "event"]},
                        "data": {"type": "string", "contentMediaType": "application/json"},
                    },
                }
            }
        },
    }
}


@router.get("/stream", response_class=Response, responses=_STREAM)
async def follow_everything(
    here: Here, overview: Shared, last_event_id: LastPlace = None
) -> Response:
    """What is, and then what changes, at most twice a second: `job` (one for each), `fleet` and
    `store` are the present state of a piece, `event` is an entry of a job's history with the name
    of the job. A reader that comes back with the last id misses no event and gets none twice;
    one that comes without it is told of those to come."""
    # before the stream begins: later there is no way to say that the ledger is away
    first = await _in_thread(overview.look)
    place = EventCursor.parse(last_event_id) if last_event_id else EventCursor(first.at)
    return EventSourceResponse(
        _messages(overview, here.everything, first, place),
        ping=KEEP_ALIVE_SECONDS,
        send_timeout=SEND_SECONDS,
    )


async def _messages(
    overview: Overview, everything: EventFeed, look: OverviewState, place: EventCursor
) -> AsyncIterator[ServerSentEvent]:
    told: Pieces = {}
    # a job that is over may be no more among those of the next look
    before: tuple[str, ...] = ()
    try:
        while True:
            for (kind, _), piece in changed(told, look.pieces).items():
                yield _message(kind, place, piece)
            told, jobs = look.pieces, tuple({*before, *look.jobs})
            events = await _in_thread(
                partial(everything.events, jobs, place, look.at, limit=MOST_EVENTS)
            )
            for place, event in events:
                yield _message("event", place, finite(event))
            if len(events) < MOST_EVENTS:
                before = look.jobs
                await anyio.sleep(LOOK_SECONDS)
                look = await _in_thread(overview.look)
    except VcasgdError as error:
        # the reader comes back with the last id, and is told then what is wrong
        log.warning("stream: %s", error)


def _message(kind: str, place: EventCursor, data: Mapping[str, Any]) -> ServerSentEvent:
    # with the place in each: a reader that was told of no event comes back to it all the same
    return ServerSentEvent(id=str(place), event=kind, data=json.dumps(data))


async def _in_thread(work: Callable[[], Result]) -> Result:
    """In a thread that a shutdown doesn't wait for."""
    return await to_thread.run_sync(work, abandon_on_cancel=True, limiter=_THREADS)
