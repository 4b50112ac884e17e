"""Routes for health checks and for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Response, status

import vcasgd
from vcasgd.api.auth import METRICS
from vcasgd.api.dependencies import (
    ControlDep,
    CostsDep,
    JobsDep,
    LedgerDep,
    ServersDep,
    WorkerBeatsDep,
)
from vcasgd.api.exposition import (
    CONTENT_TYPE,
    MAX_JOBS,
    JobSources,
    MetricSources,
    exposition,
)
from vcasgd.errors import StoreError
from vcasgd.logging import isolated
from vcasgd.schemas.service import Health
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.costs import Costs
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.workers import WorkerBeats
from vcasgd.store.quotas import read_gauges

router = APIRouter(tags=["health"])

#: Seconds after which a ledger counts as unavailable; a health check needs a prompt answer.
READY_SECONDS = 2.0
#: Threads that no other request uses, so that a silent ledger can't occupy them all.
_THREADS = CapacityLimiter(8)


@router.get("/healthz")
async def healthz() -> Health:
    """Return 200 while the process runs."""
    return Health(status="ok")


@router.get(
    "/readyz",
    responses={503: {"model": Health, "description": "Requests would fail; see `reasons`."}},
)
async def readyz(ledger: LedgerDep, response: Response) -> Health:
    """Check within two seconds that the ledger answers."""
    reason = await _ledger_error(ledger)
    if reason is None:
        return Health(status="ok")
    response.status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    return Health(status="unavailable", reasons=[reason])


async def _ledger_error(ledger: RedisClient) -> str | None:
    """Return why the ledger is unavailable. The text is public, so it contains no address."""
    try:
        with anyio.fail_after(READY_SECONDS):
            await to_thread.run_sync(ledger.ping, abandon_on_cancel=True, limiter=_THREADS)
    except TimeoutError:
        return f"the ledger does not answer within {READY_SECONDS:g} s"
    except StoreError as error:
        return f"the ledger: {type(error).__name__}"
    return None


# Prometheus defines the format, so the OpenAPI document leaves it out
@router.get(METRICS, include_in_schema=False)
def get_metrics(
    jobs: JobsDep,
    control: ControlDep,
    costs: CostsDep,
    servers: ServersDep,
    ledger: LedgerDep,
    beats: WorkerBeatsDep,
) -> Response:
    """Export metrics; clients on this machine need no token."""
    sources = MetricSources(
        version=vcasgd.__version__,
        controller=control.held(),
        states=jobs.states(),
        jobs=list(_sources(jobs, costs, beats)),
        heartbeats=servers.all(),
        ledger=read_gauges(ledger),
        machines=control.machines(),
    )
    return Response(exposition(sources), media_type=CONTENT_TYPE)


def _sources(jobs: Jobs, costs: Costs, beats: WorkerBeats) -> Iterator[JobSources]:
    """Yield the data of the active jobs that can be read."""
    for name in jobs.active()[-MAX_JOBS:]:
        with isolated(name):
            job, workers, spent = jobs.get(name), jobs.workers.count(name), costs.spent(name)
            yield JobSources(job, workers, spent, beats.traffic(name))
