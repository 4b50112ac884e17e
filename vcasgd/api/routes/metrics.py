"""What Prometheus collects."""

from __future__ import annotations

from fastapi import APIRouter, Response

import vcasgd
from vcasgd.api.auth import METRICS
from vcasgd.api.exposition import CONTENT_TYPE, MOST_JOBS, MetricSources, exposition
from vcasgd.api.services import Here
from vcasgd.errors import JobUnreadable
from vcasgd.store.gauges import read_gauges
from vcasgd.store.ledger.job import JobRecord

# its format is not ours to describe
router = APIRouter(include_in_schema=False)


@router.get(METRICS)
def get_metrics(here: Here) -> Response:
    """With the token, or without one from this machine."""
    active = here.jobs.active()
    jobs = [job for name in active[-MOST_JOBS:] if (job := _readable(here, name)) is not None]
    facts = MetricSources(
        version=vcasgd.__version__,
        controller=here.control.held(),
        states=here.jobs.states(),
        jobs=[(job, here.jobs.worker_count(job.id), here.costs.spent(job.id)) for job in jobs],
        beats=here.servers.all(),
        ledger=read_gauges(here.ledger),
        instances=here.control.instances(),
    )
    return Response(exposition(facts), media_type=CONTENT_TYPE)


def _readable(here: Here, name: str) -> JobRecord | None:
    try:
        return here.jobs.get(name)
    except JobUnreadable:
        return None
