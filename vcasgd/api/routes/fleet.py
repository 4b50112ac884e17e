"""Machines, workers, pools and servers; and taking machines away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Body, status

import vcasgd
from vcasgd.api.problems import documented
from vcasgd.api.rows import (
    Eviction,
    EvictionRequested,
    InstanceRow,
    PoolRow,
    ServerRow,
    StatusView,
    WorkerRow,
)
from vcasgd.api.services import Here, Services
from vcasgd.errors import Conflict, NotFound, SpecError
from vcasgd.logging import request_id

router = APIRouter(tags=["fleet"])

How = Annotated[Eviction | None, Body()]


@router.get("/status")
def get_status(here: Here) -> StatusView:
    """The platform as a whole."""
    active = here.jobs.active()
    return StatusView(
        version=vcasgd.__version__,
        cluster=here.settings.cluster,
        controller=here.control.held(),
        active_jobs=active,
        servers=len(here.servers.all()),
        instances=len(here.control.instances()),
        workers=sum(len(here.jobs.workers(job)) for job in active),
    )


@router.get("/jobs/{job}/workers", responses=documented(404))
def list_workers_of_job(here: Here, job: str) -> list[WorkerRow]:
    """The last heartbeat of each worker of the job."""
    return list(_workers(here, here.jobs.get(job).id))


@router.get("/workers")
def list_workers(here: Here) -> list[WorkerRow]:
    """The workers of all jobs that are not over."""
    return [row for job in here.jobs.active() for row in _workers(here, job)]


@router.get("/instances")
def list_instances(here: Here) -> list[InstanceRow]:
    """Machines, as the controller saw them last."""
    return [InstanceRow.model_validate(each) for each in _named(here.control.instances(), "id")]


@router.get("/pools")
def list_pools(here: Here) -> list[PoolRow]:
    """Places to buy machines, as the controller saw them last."""
    return [PoolRow.model_validate(each) for each in _named(here.control.pools(), "name")]


@router.get("/servers")
def list_servers(here: Here) -> list[ServerRow]:
    """The last heartbeat of each parameter server."""
    return [ServerRow.model_validate(each) for each in _named(here.servers.all(), "node")]


@router.post(
    "/workers/{worker}/evict",
    status_code=status.HTTP_202_ACCEPTED,
    responses=documented(404, 409),
)
def evict_worker(here: Here, worker: str, how: How = None) -> EvictionRequested:
    """Takes the machine that a worker runs on."""
    found = next((row for row in list_workers(here) if row.name == worker), None)
    if found is None:
        raise NotFound(f"there is no worker {worker}", status=404)
    if found.instance is None:
        raise Conflict(f"worker {worker} is on no machine of the fleet", status=409)
    return _evict(here, found.instance, how or Eviction())


@router.post(
    "/instances/{instance}/evict",
    status_code=status.HTTP_202_ACCEPTED,
    responses=documented(404),
)
def evict_instance(here: Here, instance: str, how: How = None) -> EvictionRequested:
    """Takes a machine."""
    if instance not in here.control.instances():
        raise NotFound(f"there is no instance {instance}", status=404)
    return _evict(here, instance, how or Eviction())


def _evict(here: Services, instance: str, how: Eviction) -> EvictionRequested:
    if how.kill and how.notice_seconds is not None:
        raise SpecError("kill: gives no notice", remedy="send one of the two", field="kill")
    asked = EvictionRequested(instance=instance, **how.model_dump())
    here.control.request(**asked.model_dump(), request=request_id())
    return asked


def _workers(here: Services, job: str) -> Iterator[WorkerRow]:
    """Also those in quarantine whose machine is gone, so that one can see why it is."""
    quarantined, beats = here.jobs.quarantined(job), here.jobs.workers(job)
    for name in sorted(beats.keys() | quarantined.keys()):
        fields = beats[name].to_json() if name in beats else {}
        fields |= {"name": name, "job": job, "quarantined": quarantined.get(name)}
        yield WorkerRow.model_validate(fields)


def _named(rows: dict[str, dict[str, Any]], field: str) -> list[dict[str, Any]]:
    """Rows in the order of their names, with the name among the fields."""
    return [{**row, field: name} for name, row in sorted(rows.items())]
