"""What a job says: events and log lines, as lists or as server-sent events, and metrics."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request

from vcasgd.api.problems import documented
from vcasgd.api.rows import EventRow, LogRow, MetricRow, finite
from vcasgd.api.series import SPIKY, only, with_evaluations
from vcasgd.api.services import Here
from vcasgd.api.streaming import MEDIA_TYPE, Tail, event_stream, look, wants_stream

router = APIRouter(tags=["history"])

#: ids of a Redis stream; nineteen digits always fit its 64 bits
_ID = r"^[0-9]{1,19}(-[0-9]{1,19})?$"
#: a worker learns of the job's end with a heartbeat, and sends its last lines with the next
LATE_HEARTBEATS = 4

After = Annotated[str, Query(pattern=_ID, description="only entries after the one with this id")]
LastEventId = Annotated[
    str | None, Header(alias="Last-Event-ID", pattern=_ID, description="overrides `after`")
]
Limit = Annotated[int, Query(ge=1, le=5000)]
Points = Annotated[
    int | None,
    Query(ge=10, le=5000, description="at most so many, instead of the first `limit`"),
]
Names = Annotated[
    str | None,
    Query(
        max_length=1000,
        description="fields of the answer beside `id` and `at`, separated by commas; else all",
    ),
]

_LIST_OR_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": f"A list; with `Accept: {MEDIA_TYPE}` a stream of the same entries "
        "that ends with an event `end` once the job is over.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
    }
}


@router.get(
    "/jobs/{job}/events",
    response_model=list[EventRow],
    responses=_LIST_OR_STREAM | documented(404),
)
async def list_events(
    here: Here,
    request: Request,
    job: str,
    after: After = "0",
    limit: Limit = 1000,
    last_event_id: LastEventId = None,
) -> Any:
    """What happened, oldest first."""
    tail = Tail(here.jobs, job, here.jobs.events, lambda entry: str(entry["kind"]))
    return await _answer(request, tail, last_event_id or after, limit)


@router.get(
    "/jobs/{job}/logs",
    response_model=list[LogRow],
    responses=_LIST_OR_STREAM | documented(404),
)
async def list_log_lines(
    here: Here,
    request: Request,
    job: str,
    after: After = "0",
    limit: Limit = 1000,
    last_event_id: LastEventId = None,
) -> Any:
    """Lines that workers printed, oldest first."""
    late = LATE_HEARTBEATS * here.settings.heartbeat
    tail = Tail(here.jobs, job, here.jobs.logs, lambda _: "line", late)
    return await _answer(request, tail, last_event_id or after, limit)


@router.get(
    "/jobs/{job}/metrics",
    response_model=list[MetricRow],
    response_model_exclude_unset=True,
    responses=documented(404),
)
def list_metrics(
    here: Here,
    job: str,
    after: After = "0",
    limit: Limit = 5000,
    points: Points = None,
    names: Names = None,
) -> Any:
    """The totals over time, oldest first. With `points` the whole history after `after`, thinned
    so that the highest and lowest values of the series stay."""
    found = here.jobs.get(job)
    wanted = [each.strip() for each in names.split(",")] if names else []
    if points:
        rows = here.curves.thinned(found.id, after, wanted or SPIKY, points)
    else:
        rows = here.jobs.metrics(found.id, after, limit=limit)
    rows = with_evaluations(rows, found.evaluations)
    # what was asked for by name and nothing else; otherwise all fields, null where missing
    whole = [only(row, wanted) for row in rows] if wanted else map(_whole, rows)
    return [finite(row) for row in whole]


def _whole(row: dict[str, Any]) -> dict[str, Any]:
    return MetricRow.model_validate(row).model_dump()


async def _answer(request: Request, tail: Tail, after: str, limit: int) -> Any:
    stream = wants_stream(request)
    # before a stream begins, too: later there is no way to say that there is no such job
    seen = await look(tail, after, 1 if stream else limit)
    return event_stream(tail, after) if stream else seen.entries
