"""What a job costs, and what one would cost."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from vcasgd.api.money import CostView, PlanView
from vcasgd.api.problems import documented
from vcasgd.api.routes.jobs import Submitted
from vcasgd.api.services import Here
from vcasgd.api.spend import SpendView
from vcasgd.errors import Conflict
from vcasgd.fleet.costs import report
from vcasgd.fleet.estimate import Workload, estimate
from vcasgd.fleet.pool_rows import from_row

router = APIRouter(tags=["money"])

#: that are summed up
MOST_JOBS = 1000
#: machines of this computer cost nobody anything, whatever price they play
FREE_PROVIDER = "local"


class Question(BaseModel):
    """A job that is not submitted, and what somebody knows of it: samples of an epoch, and
    samples a second of one machine. What is not given is taken from earlier jobs of the same name
    and task."""

    model_config = ConfigDict(extra="forbid")

    spec: Submitted
    samples: int | None = Field(default=None, ge=1, le=10**15)
    samples_per_second: float | None = Field(default=None, gt=0, le=1e15, allow_inf_nan=False)


@router.get("/jobs/{job}/cost", responses=documented(404))
def get_cost(here: Here, job: str) -> CostView:
    """What the job's machines have cost so far."""
    found = here.jobs.get(job)
    return CostView.of(found.id, found.spec.stop.max_cost_usd, report(here.costs.of(found.id)))


@router.post("/plan", responses=documented(409))
def plan_job(here: Here, body: Question) -> PlanView:
    """What the job would buy now, how long it would take and what it would cost. Nothing is
    bought, and nothing is submitted."""
    rows = here.control.pools()
    if not rows:
        raise Conflict(
            "no controller has told which pools there are",
            remedy="try again when one is at work; GET /api/v1/status tells",
            status=409,
        )
    known = here.workloads.get(body.spec.name, body.spec.task)
    rates = {
        (pool, kind): rate
        for name, rate in known.rates.items()
        for pool, _, kind in [name.partition("|")]
    }
    wanted = body.spec.workers.pools
    found = estimate(
        body.spec,
        [from_row(name, row) for name, row in rows.items()],
        {name: frozenset(row.get("labels") or ()) for name, row in rows.items()},
        Workload(
            samples=body.samples or known.samples,
            rates=rates,
            samples_given=body.samples is not None,
            rate_given=body.samples_per_second,
        ),
        time.time(),
        vacant=[from_row(name, row, vacant=True) for name, row in rows.items()],
    )
    return PlanView.of(found, costs_money=any(_costs(rows.get(name)) for name in wanted))


@router.get("/fleet/spend")
def get_spend(here: Here) -> SpendView:
    """What machines cost an hour now, by pool, and what the newest jobs have cost so far."""
    rows = here.control.instances().values()
    reports = [report(amounts) for amounts in here.costs.of_all(here.jobs.newest(MOST_JOBS))]
    return SpendView.of(rows, here.control.pools(), reports)


def _costs(row: dict[str, Any] | None) -> bool:
    """Whether somebody may be billed for a machine of the pool."""
    if row is None or row.get("provider") == FREE_PROVIDER:
        return False
    offers = row.get("offers")
    # with no prices known yet, they will be known when it buys
    return offers is None or any(
        each["price_per_hour"] > 0 or each["on_demand_price_per_hour"] > 0 for each in offers
    )
