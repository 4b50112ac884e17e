"""Routes for the platform: machines, workers, pools, servers, and the stream of all changes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Query, Response, status
from pydantic import TypeAdapter

import vcasgd
from vcasgd.api.access import ADMIN, READ, JobDep, Services, ServicesDep, StillValidDep
from vcasgd.api.convert import store_view
from vcasgd.api.history import MEDIA_TYPE, stream_of
from vcasgd.api.problems import documented
from vcasgd.errors import Conflict, NotFound, SpecError
from vcasgd.fleet.observed import PoolStatus
from vcasgd.fleet.pools import WITHOUT_EVICTION
from vcasgd.logging import request_id
from vcasgd.schemas.fleet import (
    Eviction,
    EvictionRequested,
    JobBrief,
    Machine,
    PoolRow,
    StatusView,
    StoreView,
    WorkerRow,
)
from vcasgd.spec.hardware import kinds_text
from vcasgd.store.ledger.events import EventCursor
from vcasgd.store.quotas import read_gauges
from vcasgd.worker_names import machine_of

router = APIRouter(tags=["fleet"])

_WORKERS, _MACHINES = TypeAdapter(list[WorkerRow]), TypeAdapter(list[Machine])

EvictionBody = Annotated[Eviction | None, Body()]


@router.get("/status", dependencies=READ)
def get_status(services: ServicesDep) -> StatusView:
    """Show the state of the whole platform. It is unavailable while the ledger takes no writes."""
    services.ledger.check_writable()
    active = services.jobs.active()
    return StatusView(
        version=vcasgd.__version__,
        cluster=services.settings.cluster,
        controller=services.control.held(),
        active_jobs=active,
        servers=len(services.servers.all()),
        machines=len(services.control.machines()),
        workers=sum(services.jobs.workers.counts(active).values()),
        ledger_full=read_gauges(services.ledger).full,
    )


@router.get("/jobs/{job}/workers", dependencies=READ, response_model=list[WorkerRow])
def list_workers_of_job(services: ServicesDep, job: JobDep) -> Response:
    """List the last heartbeat of each worker of a job."""
    return _listing(_WORKERS, list(_workers(services, [job.id])))


@router.get("/workers", dependencies=READ, response_model=list[WorkerRow])
def list_workers(services: ServicesDep) -> Response:
    """List the workers of all active jobs."""
    return _listing(_WORKERS, list(_workers(services, services.jobs.active())))


@router.get("/machines", dependencies=READ, response_model=list[Machine])
def list_machines(services: ServicesDep) -> Response:
    """List the machines, as the controller last observed them."""
    rows = _named(services.control.machines(), "id")
    return _listing(_MACHINES, [Machine.model_validate(row) for row in rows])


@router.get("/pools", dependencies=READ)
def list_pools(services: ServicesDep) -> list[PoolRow]:
    """List the pools of machines, as the controller last observed them."""
    return [
        PoolRow.model_validate(row | {"kinds": kinds_text(PoolStatus.from_row(name, row).kinds)})
        for row in _named(services.control.pools(), "name")
        for name in [row["name"]]
    ]


@router.get("/store", dependencies=READ, tags=["store"])
def get_store(services: ServicesDep) -> StoreView:
    """Show versions, queues, memory, load, and replication of all servers of the store."""
    return store_view(services.servers.all(), read_gauges(services.ledger))


def _workers(services: Services, jobs: Collection[str]) -> Iterator[WorkerRow]:
    """Yield all workers, also quarantined ones without a machine, to show why they are."""
    quarantined = services.jobs.workers.quarantined_of(jobs)
    heartbeats = services.beats.of_many(jobs)
    for job in jobs:
        for name in sorted(heartbeats[job].keys() | quarantined[job].keys()):
            beat = heartbeats[job].get(name)
            fields = dict(beat) if beat else {}
            fields |= {"name": name, "job": job, "quarantined": quarantined[job].get(name)}
            yield WorkerRow.model_validate(fields)


def _listing(kind: TypeAdapter[Any], rows: list[Any]) -> Response:
    """Return rows as JSON without validating each again, as there may be thousands."""
    return Response(kind.dump_json(rows), media_type="application/json")


def _named(rows: Mapping[str, dict[str, Any]], field: str) -> list[dict[str, Any]]:
    """Return the rows in the order of their names, with the name as a field."""
    return [{**row, field: name} for name, row in sorted(rows.items())]


# -- evictions ----------------------------------------------------------------------------------


@router.post(
    "/workers/{worker}/evict",
    dependencies=ADMIN,
    status_code=status.HTTP_202_ACCEPTED,
    responses=documented(409),
)
def evict_worker(
    services: ServicesDep, response: Response, worker: str, eviction: EvictionBody = None
) -> EvictionRequested:
    """Take the machine that a worker runs on."""
    if all(row.name != worker for row in _workers(services, services.jobs.active())):
        raise NotFound(f"there is no worker {worker}", remedy="vcasgd workers lists them")
    # What a worker says about itself doesn't count.
    machine = machine_of(worker)
    if machine not in services.control.machines():
        raise Conflict(f"worker {worker} is not on a machine of the fleet")
    return _evict(services, response, machine, eviction or Eviction())


@router.post(
    "/machines/{machine}/evict",
    dependencies=ADMIN,
    status_code=status.HTTP_202_ACCEPTED,
    responses=documented(409),
)
def evict_machine(
    services: ServicesDep, response: Response, machine: str, eviction: EvictionBody = None
) -> EvictionRequested:
    """Take a machine."""
    if machine not in services.control.machines():
        raise NotFound(
            f"there is no machine {machine}", remedy="vcasgd machines and vcasgd workers list names"
        )
    return _evict(services, response, machine, eviction or Eviction())


@router.get("/requests/{request}", dependencies=READ)
def get_request(services: ServicesDep, request: str) -> EvictionRequested:
    """Show the result of a request for an eviction, for an hour after it was sent."""
    result = services.control.result(request)
    if result is None:
        raise NotFound(f"there is no request {request}, or it has expired")
    return EvictionRequested.model_validate(result)


def _evict(
    services: Services, response: Response, machine: str, eviction: Eviction
) -> EvictionRequested:
    if eviction.kill and eviction.notice_seconds is not None:
        raise SpecError(
            "kill: kill and notice_seconds exclude each other",
            remedy="send either kill or notice_seconds",
            field="kill",
        )
    if not eviction.kill and _provider_of(services, machine) in WITHOUT_EVICTION:
        raise Conflict(
            f"{machine}: its cloud gives no notice on request",
            remedy="end it without a notice (vcasgd evict --kill), or interrupt it with AWS's "
            "Fault Injection Service (aws:ec2:send-spot-instance-interruptions)",
        )
    details = {"machine": machine, **eviction.model_dump()}
    identifier = services.control.request("evict", **details, request=request_id())
    response.headers["Location"] = f"/api/v1/requests/{identifier}"
    return EvictionRequested(id=identifier, **details)


def _provider_of(services: Services, machine: str) -> object:
    """Return the name of a machine's provider; None if its pool is not known."""
    row = services.control.machines().get(machine, {})
    return services.control.pools().get(str(row.get("pool")), {}).get("provider")


# -- the stream ---------------------------------------------------------------------------------

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


@router.get("/overview", dependencies=READ, tags=["stream"])
def get_overview(
    services: ServicesDep, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> list[JobBrief]:
    """List the active jobs and the newest ones, newest first, with what changes while they run.
    The stream has the same rows."""
    return services.platform.overview(limit)


@router.get(
    "/stream", dependencies=READ, response_class=Response, responses=_STREAM, tags=["stream"]
)
async def follow_everything(
    services: ServicesDep,
    valid: StillValidDep,
    after: After = None,
    last_event_id: LastEventId = None,
) -> Response:
    """Stream the current state, and then its changes at most twice a second.

    `job` (one for each job), `fleet`, and `store` contain the current state of a part of the
    platform. `machines` contains the machines that changed or are gone; with `whole`, forget all
    others. `event` is an event of a job, with the job's name. If you reconnect with the last ID,
    you receive each event exactly once. Without an ID, you receive new events only.
    """
    # Observe before the stream starts: later, the response can't report an error.
    state, position = await services.platform.newest(), last_event_id or after
    cursor = EventCursor.parse(position) if position else EventCursor(state.at)
    return stream_of(services.platform.follow(state, cursor, valid))
