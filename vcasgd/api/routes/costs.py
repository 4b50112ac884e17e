"""Routes for costs, and for plans with estimated costs."""

from __future__ import annotations

import time
from dataclasses import replace

from fastapi import APIRouter

from vcasgd.api.access import READ, JobDep, Services, ServicesDep
from vcasgd.api.convert import spend_view
from vcasgd.api.problems import documented
from vcasgd.errors import Conflict
from vcasgd.fleet.costs import report
from vcasgd.fleet.estimate import PlannedWork, estimate
from vcasgd.fleet.observed import pools_in
from vcasgd.schemas.costs import CostView, PlanRequest, PlanView, SpendView
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.costs import month_of

router = APIRouter(tags=["money"])

#: Number of the newest jobs whose costs are summed.
MAX_JOBS = 1000


@router.get("/jobs/{job}/cost", dependencies=READ)
def get_cost(services: ServicesDep, job: JobDep) -> CostView:
    """Show the cost of a job's machines so far."""
    booked = report(services.costs.of(job.id))
    return CostView(**vars(booked), job=job.id, max_cost_usd=job.spec.stop.max_cost_usd)


def planned_work(services: Services, spec: JobSpec) -> PlannedWork:
    """Return the work of a job as earlier ones with its name and task measured it."""
    return PlannedWork(**vars(services.workloads.get(spec.name, spec.task)))


@router.post("/plan", dependencies=READ, responses=documented(409))
def plan_job(services: ServicesDep, body: PlanRequest) -> PlanView:
    """Estimate what a job would buy now, how long it would take, and what it would cost. This
    buys nothing and submits nothing."""
    offered = pools_in(services.control.pools())
    if not offered:
        raise Conflict(
            "no controller has reported its pools yet",
            remedy="try again once one is running: see vcasgd status, or the page Fleet",
        )
    work = planned_work(services, body.spec)
    return estimate(
        body.spec,
        [pool.with_room() for pool in offered],
        replace(
            work,
            samples=body.samples or work.samples,
            samples_given=body.samples is not None,
            rate_given=body.samples_per_second,
            parameters=body.parameters,
        ),
        time.time(),
        vacant=[pool.with_room(vacant=True) for pool in offered],
        store_zone=services.settings.store_zone,
    )


@router.get("/fleet/spend", dependencies=READ)
def get_spend(services: ServicesDep) -> SpendView:
    """Show the current cost of machines per hour, by pool, and the cost of the newest jobs."""
    newest = services.jobs.newest(MAX_JOBS)
    reports = [report(amounts) for amounts in services.costs.of_all(newest)]
    control = services.control
    view = spend_view(control.machines().values(), control.pools(), reports)
    month = sum(services.costs.spent_in(month_of(time.time())).values())
    budget = services.settings.monthly_budget_usd
    return view.model_copy(update={"month_usd": month, "monthly_budget_usd": budget})
