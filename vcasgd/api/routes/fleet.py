"""Routes for machines, workers, pools, and servers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Body, Response, status
from pydantic import TypeAdapter

import vcasgd
from vcasgd.api.access import ADMIN, READ
from vcasgd.api.convert import store_view
from vcasgd.api.dependencies import (
    ControlDep,
    JobsDep,
    LedgerDep,
    ServersDep,
    SettingsDep,
    WorkerBeatsDep,
)
from vcasgd.api.problems import documented
from vcasgd.errors import Conflict, NotFound, SpecError
from vcasgd.fleet.pools import WITHOUT_EVICTION
from vcasgd.logging import request_id
from vcasgd.schemas.fleet import (
    Eviction,
    EvictionRequested,
    MachineRow,
    PoolRow,
    ServerRow,
    StatusView,
    StoreView,
    WorkerRow,
)
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.workers import WorkerBeats
from vcasgd.store.quotas import read_gauges

router = APIRouter(tags=["fleet"])

_WORKERS, _MACHINES = TypeAdapter(list[WorkerRow]), TypeAdapter(list[MachineRow])

EvictionBody = Annotated[Eviction | None, Body()]


@router.get("/status", dependencies=READ)
def get_status(
    settings: SettingsDep,
    jobs: JobsDep,
    control: ControlDep,
    servers: ServersDep,
    ledger: LedgerDep,
) -> StatusView:
    """Show the state of the whole platform."""
    active = jobs.active()
    return StatusView(
        version=vcasgd.__version__,
        cluster=settings.cluster,
        controller=control.held(),
        active_jobs=active,
        servers=len(servers.all()),
        machines=len(control.machines()),
        workers=sum(jobs.workers.counts(active).values()),
        ledger_full=read_gauges(ledger).full,
    )


@router.get(
    "/jobs/{job}/workers",
    dependencies=READ,
    response_model=list[WorkerRow],
    responses=documented(404),
)
def list_workers_of_job(jobs: JobsDep, beats: WorkerBeatsDep, job: str) -> Response:
    """List the last heartbeat of each worker of a job."""
    return _listing(_WORKERS, list(_workers(jobs, beats, [jobs.get(job).id])))


@router.get("/workers", dependencies=READ, response_model=list[WorkerRow])
def list_workers(jobs: JobsDep, beats: WorkerBeatsDep) -> Response:
    """List the workers of all active jobs."""
    return _listing(_WORKERS, list(_workers(jobs, beats, jobs.active())))


@router.get("/machines", dependencies=READ, response_model=list[MachineRow])
def list_machines(control: ControlDep) -> Response:
    """List the machines, as the controller last observed them."""
    rows = _named(control.machines(), "id")
    return _listing(_MACHINES, [MachineRow.model_validate(each) for each in rows])


@router.get("/pools", dependencies=READ)
def list_pools(control: ControlDep) -> list[PoolRow]:
    """List the pools of machines, as the controller last observed them."""
    return [PoolRow.model_validate(each) for each in _named(control.pools(), "name")]


@router.get("/servers", dependencies=READ)
def list_servers(servers: ServersDep) -> list[ServerRow]:
    """List the last heartbeat of each parameter server."""
    return [ServerRow.model_validate(each) for each in _named(servers.all(), "node")]


@router.get("/store", dependencies=READ, tags=["store"])
def get_store(servers: ServersDep, ledger: LedgerDep) -> StoreView:
    """Show versions, queues, memory, load, and replication of all servers of the store."""
    return store_view(servers.all(), read_gauges(ledger))


@router.post(
    "/workers/{worker}/evict",
    dependencies=ADMIN,
    status_code=status.HTTP_202_ACCEPTED,
    responses=documented(404, 409, 413),
)
def evict_worker(
    response: Response,
    jobs: JobsDep,
    control: ControlDep,
    beats: WorkerBeatsDep,
    worker: str,
    eviction: EvictionBody = None,
) -> EvictionRequested:
    """Take the machine that a worker runs on."""
    rows = _workers(jobs, beats, jobs.active())
    row = next((row for row in rows if row.name == worker), None)
    if row is None:
        raise NotFound(f"there is no worker {worker}")
    if row.machine is None:
        raise Conflict(f"worker {worker} is not on a machine of the fleet")
    return _evict(response, control, row.machine, eviction or Eviction())


@router.post(
    "/machines/{machine}/evict",
    dependencies=ADMIN,
    status_code=status.HTTP_202_ACCEPTED,
    responses=documented(404, 409, 413),
)
def evict_machine(
    response: Response, control: ControlDep, machine: str, eviction: EvictionBody = None
) -> EvictionRequested:
    """Take a machine."""
    if machine not in control.machines():
        raise NotFound(f"there is no machine {machine}")
    return _evict(response, control, machine, eviction or Eviction())


@router.get("/requests/{request}", dependencies=READ, responses=documented(404))
def get_request(control: ControlDep, request: str) -> EvictionRequested:
    """Show the result of a request for an eviction, for an hour after it was sent."""
    result = control.result(request)
    if result is None:
        raise NotFound(f"there is no request {request}, or it has expired")
    outcome = {"state": result.state, "problem": result.problem, "remedy": result.remedy}
    fields = {n: each for n, each in result.request.items() if n in EvictionRequested.model_fields}
    return EvictionRequested.model_validate({**fields, **outcome})


def _evict(
    response: Response, control: Control, machine: str, eviction: Eviction
) -> EvictionRequested:
    if eviction.kill and eviction.notice_seconds is not None:
        raise SpecError(
            "kill: kill and notice_seconds exclude each other",
            remedy="send either kill or notice_seconds",
            field="kill",
        )
    if not eviction.kill and _provider_of(control, machine) in WITHOUT_EVICTION:
        raise Conflict(
            f"{machine}: its cloud gives no notice on request",
            remedy="end it without a notice (vcasgd evict --kill), or interrupt it with AWS's "
            "Fault Injection Service (aws:ec2:send-spot-instance-interruptions)",
        )
    details = {"machine": machine, **eviction.model_dump()}
    identifier = control.request("evict", **details, request=request_id())
    response.headers["Location"] = f"/api/v1/requests/{identifier}"
    return EvictionRequested(id=identifier, **details)


def _provider_of(control: Control, machine: str) -> object:
    """Return the name of a machine's provider; None if its pool is not known."""
    row = control.machines().get(machine, {})
    return control.pools().get(str(row.get("pool")), {}).get("provider")


def _workers(jobs: Jobs, beats: WorkerBeats, ids: Collection[str]) -> Iterator[WorkerRow]:
    """Yield all workers, also quarantined ones without a machine, to show why they are."""
    quarantined, heartbeats = jobs.workers.quarantined_of(ids), beats.of_many(ids)
    for job in ids:
        for name in sorted(heartbeats[job].keys() | quarantined[job].keys()):
            beat = heartbeats[job].get(name)
            fields = beat.to_json() if beat else {}
            fields |= {"name": name, "job": job, "quarantined": quarantined[job].get(name)}
            yield WorkerRow.model_validate(fields)


def _listing(kind: TypeAdapter[Any], rows: list[Any]) -> Response:
    """Return rows as JSON without validating each again, as there may be thousands."""
    return Response(kind.dump_json(rows), media_type="application/json")


def _named(rows: dict[str, dict[str, Any]], field: str) -> list[dict[str, Any]]:
    """Return the rows in the order of their names, with the name as a field."""
    return [{**row, field: name} for name, row in sorted(rows.items())]
