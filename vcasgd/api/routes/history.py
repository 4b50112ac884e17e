"""Routes for a job's history: events, log lines, metrics, staleness, machines, and subtasks."""

from __future__ import annotations

from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Header, Query, Request

from vcasgd.api.access import READ, JobDep, ServicesDep, StillValidDep
from vcasgd.api.convert import staleness_view, timeline_view
from vcasgd.api.history import (
    MEDIA_TYPE,
    SPIKY,
    LogReader,
    StillValid,
    Tail,
    first_after,
    history,
    stream_of,
    with_evaluations,
)
from vcasgd.errors import SpecError
from vcasgd.limits import LOG_LINES_KEPT, MAX_SEARCHED
from vcasgd.schemas.base import finite
from vcasgd.schemas.history import (
    EventRow,
    LogRow,
    MetricRow,
    StalenessView,
    SubtasksView,
    TimelineView,
)
from vcasgd.spec.values import described
from vcasgd.store.ledger.events import position_of
from vcasgd.store.ledger.subtasks import read_subtasks

router = APIRouter()

#: Pattern of the IDs of a Redis stream; 19 digits always fit its 64 bits.
_ID = described(r"^[0-9]{1,19}(-[0-9]{1,19})?$", "the ID of an entry, such as 1700000000000-0")
#: Heartbeats after a job's end in which log lines may arrive: a worker learns of the end with
#: one heartbeat, and sends its last lines with the next.
LATE_HEARTBEATS = 4
#: Most letters in a response, and by default; an epoch may have a million subtasks.
MAX_LETTERS, LETTERS = 100_000, 10_000

After = Annotated[str, Query(pattern=_ID, description="Return only entries after this ID.")]
LastEventId = Annotated[
    str | None, Header(alias="Last-Event-ID", pattern=_ID, description="Overrides `after`.")
]
Limit = Annotated[int, Query(ge=1, le=5000, description="Most entries in the response.")]
PointLimit = Annotated[
    int | None,
    Query(
        alias="points",
        ge=10,
        le=5000,
        description="Thin the whole history to at most this many points.",
    ),
]
Names = Annotated[
    str | None,
    Query(
        max_length=1000,
        description="Fields to return beside `id` and `at`, separated by commas. Default: all.",
    ),
]
Epoch = Annotated[int | None, Query(ge=1, description="Number from 1. Default: the current one.")]
Letters = Annotated[
    int,
    Query(
        ge=1,
        le=MAX_LETTERS,
        description="Most letters in `states`. If the epoch has more subtasks, each letter stands "
        "for `per_letter` of them.",
    ),
]

LastLines = Annotated[
    int | None, Query(ge=1, le=LOG_LINES_KEPT, description="Only the last lines, so many.")
]
WorkerPart = Annotated[
    str, Query(max_length=MAX_SEARCHED, description="Only of workers with this in their name.")
]
Since = Annotated[
    float | None, Query(ge=0, le=1e12, description="Only since this time, in Unix seconds.")
]
Searched = Annotated[
    str, Query(max_length=MAX_SEARCHED, description="Only lines with this text; case is ignored.")
]

_LIST_OR_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": f"A list. With `Accept: {MEDIA_TYPE}`, a stream of the same entries that "
        "ends with an event `end` when the job ends.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
    }
}


@router.get(
    "/jobs/{job}/events",
    dependencies=READ,
    response_model=list[EventRow],
    responses=_LIST_OR_STREAM,
    tags=["history"],
)
async def list_events(
    services: ServicesDep,
    request: Request,
    valid: StillValidDep,
    job: str,
    after: After = "0",
    limit: Limit = 1000,
    last_event_id: LastEventId = None,
) -> Any:
    """List or stream the events of a job, oldest first."""
    tail = Tail(services.jobs, job, services.jobs.events, lambda entry: str(entry["kind"]))
    return await _entries(request, tail, last_event_id or after, limit, valid)


@router.get(
    "/jobs/{job}/logs",
    dependencies=READ,
    response_model=list[LogRow],
    responses=_LIST_OR_STREAM,
    tags=["history"],
)
async def list_log_lines(
    services: ServicesDep,
    request: Request,
    valid: StillValidDep,
    job: str,
    after: After = "0",
    limit: Limit = 1000,
    tail: LastLines = None,
    worker: WorkerPart = "",
    since: Since = None,
    grep: Searched = "",
    last_event_id: LastEventId = None,
) -> Any:
    """List or stream the lines that workers printed and logged, oldest first."""
    late = LATE_HEARTBEATS * services.settings.heartbeat
    reader = LogReader(services.jobs, worker, grep)
    starts = [last_event_id or after]
    if since is not None:
        starts.append(first_after(since))
    if tail is not None and last_event_id is None:
        starts.append(await to_thread.run_sync(reader.before_last, job, tail))
    lines = Tail(services.jobs, job, reader, lambda _: "line", late)
    return await _entries(request, lines, max(starts, key=position_of), limit, valid)


async def _entries(request: Request, tail: Tail, after: str, limit: int, valid: StillValid) -> Any:
    if MEDIA_TYPE in request.headers.get("accept", ""):
        # later, the response can't report an unknown job
        await to_thread.run_sync(tail.jobs.get, tail.job)
        return stream_of(history(tail, after, valid))
    _, entries = await tail.after(after, limit)
    return entries


@router.get(
    "/jobs/{job}/metrics",
    dependencies=READ,
    response_model=list[MetricRow],
    response_model_exclude_unset=True,
    tags=["history"],
)
def list_metrics(
    services: ServicesDep,
    job: JobDep,
    after: After = "0",
    limit: Limit = 5000,
    points: PointLimit = None,
    names: Names = None,
) -> Any:
    """List the metrics over time, oldest first. `points` thins the whole history after `after`,
    and keeps the highest and the lowest values of each series."""
    fields = [name.strip() for name in names.split(",")] if names else []
    if points:
        rows = services.curves.thinned(job.id, after, fields or SPIKY, points)
    else:
        rows = services.jobs.metrics(job.id, after, limit=limit)
    return [_metric(row, fields) for row in with_evaluations(rows, job.evaluations)]


def _metric(row: dict[str, Any], fields: list[str]) -> Any:
    """Return the selected fields, or all fields with null for missing ones."""
    if fields:
        return finite({name: row.get(name) for name in ("id", "at", *fields)})
    return MetricRow.model_validate(row).model_dump()


@router.get("/jobs/{job}/staleness", dependencies=READ, tags=["insight"])
def get_staleness(job: JobDep) -> StalenessView:
    """Show the staleness of a job's updates, in versions."""
    return staleness_view(job)


@router.get("/jobs/{job}/timelines", dependencies=READ, tags=["insight"])
def list_timelines(services: ServicesDep, job: JobDep) -> list[TimelineView]:
    """List the newest 1000 machines of a job with their states while the job had them, in the
    order of their start."""
    lanes = services.jobs.timelines(job.id)
    views = (timeline_view(machine, lane, job) for machine, lane in lanes.items())
    return sorted(filter(None, views), key=lambda view: (view.spans[0].since, view.machine))


@router.get("/jobs/{job}/subtasks", dependencies=READ, tags=["insight"])
def get_subtasks(
    services: ServicesDep, job: JobDep, epoch: Epoch = None, letters: Letters = LETTERS
) -> SubtasksView:
    """Show the states of an epoch's subtasks, one by one, or in groups if there are many."""
    epochs = job.epochs or 1
    number = min(job.finished_epochs + 1, epochs) if epoch is None else epoch
    if number > epochs:
        raise SpecError(f"epoch: the job has {epochs}", field="epoch")
    # 0 until a worker has read the data, if the job doesn't set it
    work = services.jobs.work(job.id)
    per_epoch = work.get("per_epoch", 0)
    first = (number - 1) * per_epoch
    # the last epoch may be cut short
    total = max(0, min(per_epoch, work.get("total", 0) - first))
    shards = job.facts.shards if job.facts else 1
    states = read_subtasks(services.ledger, job.id, per_epoch, first, total, shards=shards)
    per_letter = max(1, -(-total // letters))
    return SubtasksView(
        epoch=number,
        first=first,
        total=total,
        per_letter=per_letter,
        states=states.text(per_letter),
        counts=states.counts(),
    )
