"""Routes for machines that join by themselves. They need a token with scope join."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Response, status

import vcasgd
from vcasgd.api.access import JOIN, CallerDep, ServicesDep
from vcasgd.api.callers import Caller
from vcasgd.api.problems import documented
from vcasgd.api.routes.files import package_response
from vcasgd.errors import Conflict, JobUnreadable, NotFound, SpecError, VersionDiffers
from vcasgd.fleet.pools import JOIN as JOIN_PROVIDER
from vcasgd.fleet.pools import ORDERED_PROVIDERS
from vcasgd.fleet.providers.joining import pool_of_ordered
from vcasgd.schemas.fleet import WorkerOrder
from vcasgd.schemas.joining import (
    MACHINE_SECRET,
    MIN_MACHINE_SECRET,
    JoinRequest,
    JoinView,
    OrderView,
    ReportBody,
    ReportView,
)
from vcasgd.store.admission import LEDGER, tensors_service
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.jobs import Jobs

log = logging.getLogger(__name__)

router = APIRouter(tags=["machines"])

_Secret = Annotated[
    str,
    Header(alias=MACHINE_SECRET, max_length=200, description="Secret of the machine, its own."),
]


def _own_machine(
    services: ServicesDep, caller: CallerDep, machine: str, secret: _Secret = ""
) -> str:
    """Return the machine. Raises :class:`NotFound` unless it asks itself."""
    found = services.joined.get(machine)
    if found is None or not found.sent(caller.name, caller.digest, secret):
        raise NotFound(f"no machine {machine} has joined with this token and this secret")
    return machine


#: The machine in the path of a route, of which it asks itself.
OwnMachine = Annotated[str, Depends(_own_machine)]

#: Heartbeats between two reports; a machine is lost after many of them.
REPORT_HEARTBEATS = 2.0


@router.post(
    "/join", dependencies=JOIN, status_code=status.HTTP_201_CREATED, responses=documented(409)
)
def join(
    services: ServicesDep,
    caller: CallerDep,
    response: Response,
    body: JoinRequest,
    secret: _Secret = "",
) -> JoinView:
    """Join with a machine. The status is 409 if its version differs, if there are too many
    machines, or if the token's pool is gone."""
    if body.version != vcasgd.__version__:
        raise VersionDiffers(
            f"the stack has vcasgd {vcasgd.__version__}, and this machine {body.version}",
            remedy=f"pip install 'vcasgd[worker]=={vcasgd.__version__}'",
            version=vcasgd.__version__,
        )
    if len(secret) < MIN_MACHINE_SECRET:
        raise SpecError(
            f"{MACHINE_SECRET}: shorter than {MIN_MACHINE_SECRET} characters",
            field=MACHINE_SECRET,
            status=422,
        )
    pool = _pool(services.control, caller, body.machine)
    machine = services.joined.join(
        caller.name, caller.digest, secret, caller.max_machines, pool, body
    )
    log.info("%s joins pool %s: %s at %s", machine.name, pool, body, body.host)
    response.headers["Location"] = f"/api/v1/machines/{machine.name}"
    tensors = map(tensors_service, range(len(services.settings.tensors_urls())))
    return JoinView(
        machine=machine.name,
        pool=pool,
        cluster=services.settings.cluster,
        services=[LEDGER, *tensors],
        period=REPORT_HEARTBEATS * services.settings.heartbeat,
        heartbeat=services.settings.heartbeat,
        expires_at=caller.expires_at,
    )


@router.post("/machines/{machine}/report", dependencies=JOIN)
def report_machine(
    services: ServicesDep, response: Response, machine: OwnMachine, body: ReportBody
) -> ReportView:
    """Report the state of a machine, and learn what it has to do. The status is 404 after it was
    removed; it can join again then."""
    orders, end = services.joined.report(machine, body.workers, leaving=body.leaving)
    # it contains credentials
    response.headers["Cache-Control"] = "no-store"
    return ReportView(
        orders=[view for order in orders if (view := _order(services.jobs, order))],
        leave=end.reason if end else None,
        leave_by=max(0.0, end.by - services.joined.now()) if end else None,
        version=vcasgd.__version__,
    )


@router.get(
    "/machines/{machine}/packages/{digest}",
    dependencies=JOIN,
    response_class=Response,
    responses={200: {"content": {"application/zip": {}}}},
)
def get_machine_package(services: ServicesDep, machine: OwnMachine, digest: str) -> Response:
    """Return the code of a job that the machine has to work for, as a zip."""
    orders = (_order(services.jobs, order) for order in services.joined.orders_of(machine))
    if digest not in {view.package for view in orders if view}:
        raise NotFound(f"{machine} has no job with package {digest[:12]}")
    return package_response(services.storage, digest)


@router.delete("/machines/{machine}", dependencies=JOIN, status_code=status.HTTP_204_NO_CONTENT)
def leave(services: ServicesDep, machine: OwnMachine) -> None:
    """Leave with a machine, whose workers have ended."""
    services.joined.remove(machine)
    log.info("%s has left", machine)


def _pool(control: Control, caller: Caller, machine: str | None) -> str:
    """Return the pool that a token is for.

    ``machine``: the machine's name, if it was ordered. Raises :class:`Conflict` if no such machine
    can join the pool.
    """
    pools = control.pools()
    row = pools.get(caller.pool or "", {})
    if caller.pool is not None and row.get("provider") in ORDERED_PROVIDERS:
        # A token of one pool must not take over what was ordered in another one.
        if pool_of_ordered(machine or "") != caller.pool:
            raise Conflict(
                f"the stack orders the machines of pool {caller.pool} itself",
                remedy="use a token for a pool with provider join",
            )
        return caller.pool
    if caller.pool is None or row.get("provider") != JOIN_PROVIDER or machine is not None:
        raise Conflict(
            f"no machine can join pool {caller.pool}: there is no such pool with provider "
            f"{JOIN_PROVIDER}",
            remedy="ask the stack's administrator to add it to the pools file",
        )
    most = row.get("capacity")
    if most is not None and int(row.get("machines") or 0) >= most:
        raise Conflict(
            f"pool {caller.pool} has {most} machines, which is its limit",
            remedy="try again later, or ask the stack's administrator to raise max_machines",
        )
    return caller.pool


def _order(jobs: Jobs, order: WorkerOrder) -> OrderView | None:
    """Return what a machine needs to run a worker; None if its job is gone."""
    try:
        job = jobs.get(order.job)
    except (NotFound, JobUnreadable):
        return None
    beat = jobs.workers.heartbeat(order.job, order.worker)
    work = jobs.work(order.job)
    total = work.get("total", 0)
    return OrderView(
        **vars(order),
        name=job.spec.name,
        package=job.package,
        progress=min(1.0, work["finished"] * work["per_epoch"] / total) if total else None,
        doing=beat.doing if beat else None,
        samples=beat.samples if beat else None,
    )
