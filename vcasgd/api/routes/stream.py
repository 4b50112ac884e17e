"""Route that streams all changes of the platform as server-sent events."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response

from vcasgd.api.access import READ, StillValidDep
from vcasgd.api.dependencies import PlatformDep
from vcasgd.api.streaming import MEDIA_TYPE, stream_of
from vcasgd.schemas.stream import JobBrief
from vcasgd.store.ledger.events import EventCursor

router = APIRouter(tags=["stream"])

#: Pattern of a position in the events of all jobs.
_POSITION = r"^[0-9]{1,19}-[0-9]{1,19}(/[A-Za-z0-9._-]{0,200})?$"

After = Annotated[
    str | None,
    Query(pattern=_POSITION, description="Start with the events after this position."),
]
LastEventId = Annotated[
    str | None,
    Header(alias="Last-Event-ID", pattern=_POSITION, description="Overrides `after`."),
]
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events of the types `job`, `fleet`, `machines`, `store`, and `event`.",
        "content": {
            MEDIA_TYPE: {
                "schema": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "string"},
                        "event": {"enum": ["job", "fleet", "machines", "store", "event"]},
                        "data": {"type": "string", "contentMediaType": "application/json"},
                    },
                }
            }
        },
    }
}


@router.get("/overview", dependencies=READ)
def get_overview(
    platform: PlatformDep, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> list[JobBrief]:
    """List the active jobs and the newest ones, newest first, with what changes while they run.
    The stream has the same rows."""
    return platform.overview(limit)


@router.get("/stream", dependencies=READ, response_class=Response, responses=_STREAM)
async def follow_everything(
    platform: PlatformDep,
    valid: StillValidDep,
    after: After = None,
    last_event_id: LastEventId = None,
) -> Response:
    """Stream the current state, and then its changes at most twice a second.

    `job` (one for each job), `fleet`, and `store` contain the current state of a part of the
    platform. `machines` contains the machines that changed or are gone; with `whole`, forget all
    others. `event` is an event of
    a job, with the job's name. If you reconnect with the last ID, you receive each event exactly
    once. Without an ID, you receive new events only.
    """
    # Observe before the stream starts: later, the response can't report an error.
    state, position = await platform.newest(), last_event_id or after
    cursor = EventCursor.parse(position) if position else EventCursor(state.at)
    return stream_of(platform.follow(state, cursor, valid))
