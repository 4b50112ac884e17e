"""Routes for costs, and for plans with estimated costs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from fastapi import APIRouter

from vcasgd.api.access import READ, JobDep, Services, ServicesDep
from vcasgd.api.convert import spend_view
from vcasgd.api.problems import documented
from vcasgd.errors import Conflict
from vcasgd.fleet.costs import report
from vcasgd.fleet.estimate import PlannedWork, estimate
from vcasgd.fleet.observed import pools_in
from vcasgd.fleet.pools import JOIN, pools_of_job
from vcasgd.schemas.costs import CostView, PlanRequest, PlanView, SpendView
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.costs import month_of

router = APIRouter(tags=["money"])

#: Number of the newest jobs whose costs are summed.
MAX_JOBS = 1000
#: Providers whose machines cause no bill, even if they have a simulated price.
FREE_PROVIDERS = ("local", JOIN)


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
    pools = services.control.pools()
    if not pools:
        raise Conflict(
            "no controller has reported its pools yet",
            remedy="try again once one is running: see vcasgd status, or the page Fleet",
        )
    offered = pools_in(pools)
    work = planned_work(services, body.spec)
    plan = estimate(
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
    named = pools_of_job(body.spec, offered, {pool.name: pool.kinds for pool in offered})
    costs_money = any(_costs_money(pools.get(name)) for name in named)
    return plan.model_copy(update={"costs_money": costs_money})


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


def _costs_money(pool: dict[str, Any] | None) -> bool:
    """Return True if a machine of the pool may cause a bill."""
    if pool is None or pool.get("provider") in FREE_PROVIDERS:
        return False
    offers = pool.get("offers")
    # prices that are not known yet will be when the job buys
    return offers is None or any(
        offer["price_per_hour"] > 0 or offer["on_demand_price_per_hour"] > 0 for offer in offers
    )
