"""What jobs cost, and would cost, as the API shows it. USD and seconds."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from vcasgd.fleet.costs import CostReport
from vcasgd.fleet.estimate import Estimate


class _View(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class WasteView(_View):
    """Machine seconds that trained nothing, and what they cost."""

    seconds: float
    usd: float


class PoolCostView(_View):
    """A part of the cost: a pool's spot machines, or its others."""

    pool: str
    spot: bool
    seconds: float
    usd: float
    on_demand_usd: float


class Wasted(_View):
    """`booting` and `idle` machines did nothing; `lost_work` was trained and never pushed."""

    booting: WasteView
    idle: WasteView
    lost_work: WasteView


class CostView(_View):
    """What the machines of a job have cost so far, and what the same hours cost on demand.

    Booked every 10 seconds at least; a control plane, disks and traffic are not in it.
    """

    job: str
    spent_usd: float
    on_demand_usd: float
    saved_usd: float
    max_cost_usd: float | None
    machine_seconds: float
    pools: list[PoolCostView]
    wasted: Wasted

    @classmethod
    def of(cls, job: str, budget: float | None, report: CostReport) -> CostView:
        return cls(
            job=job,
            spent_usd=report.spent_usd,
            on_demand_usd=report.on_demand_usd,
            saved_usd=report.saved_usd,
            max_cost_usd=budget,
            machine_seconds=report.machine_seconds,
            pools=[PoolCostView.model_validate(each) for each in report.pools],
            wasted=Wasted.model_validate(report),
        )


class OfferView(_View):
    """What a pool sells: one type of machine in one zone. `machines`: how many of it the job
    would buy; `excluded`: why it can't be bought; `as_of`: of the price (Unix seconds)."""

    pool: str
    zone: str
    instance_type: str
    spot: bool
    cpus: float
    gpus: int
    price_per_hour: float
    on_demand_price_per_hour: float
    samples_per_second: float | None
    usd_per_million_samples: float | None
    machines: int
    excluded: str | None
    as_of: float
    source: str


class VerdictView(_View):
    """Whether a pool is of use to the job, and if not, why."""

    pool: str
    usable: bool
    reasons: list[str]


class PlanView(_View):
    """What a job would buy now, and what that would come to. `null`: not known; `remedies` say
    what to do about it. `costs_money`: whether its pools sell anything that somebody is billed
    for."""

    machines: int
    usd_per_hour: float
    on_demand_usd_per_hour: float
    hours: float | None
    cost_usd: float | None
    on_demand_cost_usd: float | None
    costs_money: bool
    offers: list[OfferView]
    pools: list[VerdictView]
    assumptions: list[str]
    remedies: list[str]

    @classmethod
    def of(cls, plan: Estimate, *, costs_money: bool) -> PlanView:
        return cls(
            machines=plan.machines,
            usd_per_hour=plan.usd_per_hour,
            on_demand_usd_per_hour=plan.on_demand_usd_per_hour,
            hours=plan.hours,
            cost_usd=plan.cost_usd,
            on_demand_cost_usd=plan.on_demand_cost_usd,
            costs_money=costs_money,
            offers=[
                OfferView.model_validate({**vars(row.offer), **vars(row)}) for row in plan.offers
            ],
            pools=[VerdictView.model_validate(each) for each in plan.pools],
            assumptions=list(plan.assumptions),
            remedies=list(plan.remedies),
        )
