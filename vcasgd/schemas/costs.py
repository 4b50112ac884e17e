"""Costs of jobs and machines, and priced plans. Amounts are in USD, durations in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import Field

from vcasgd.schemas.base import RequestBody, Schema
from vcasgd.schemas.jobs import SubmittedSpec
from vcasgd.spec.hardware import Hardware


@dataclass(frozen=True)
class Workload:
    """Measurements of jobs with the same name and task.

    ``samples``: samples of an epoch. ``batch_size``: samples in a local step. ``rates``:
    ``pool|machine type`` → samples per second of one machine. ``bytes_per_sample``: what workers
    pushed and fetched. ``start_seconds``: from a machine's launch to its first samples.
    ``memory_bytes`` and ``gpu_memory_bytes``: what a worker used at most.
    """

    samples: int | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    batch_size: int | None = None
    bytes_per_sample: float | None = None
    memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    start_seconds: float | None = None

    @property
    def speeds(self) -> dict[tuple[str, str], float]:
        """The rates by pool and machine type."""
        return {
            (pool, kind): rate
            for name, rate in self.rates.items()
            for pool, _, kind in [name.partition("|")]
        }


class WasteView(Schema):
    """Machine time that trained nothing, and its cost."""

    seconds: float
    usd: float


class WastedView(Schema):
    """Machine time that trained nothing, by cause."""

    booting: WasteView
    idle: WasteView
    lost_work: WasteView = Field(description="Training whose result was never pushed.")


class PoolCostView(Schema):
    """Cost of a pool's spot machines, or of its on-demand machines."""

    pool: str
    spot: bool
    seconds: float
    usd: float
    on_demand_usd: float


class CostReport(Schema):
    """Cost of machines, and the price of the same hours on demand."""

    spent_usd: float
    on_demand_usd: float
    saved_usd: float
    machine_seconds: float
    pools: list[PoolCostView]
    wasted: WastedView


class CostView(CostReport):
    """Cost of a job's machines so far, and the price of the same hours on demand.

    The controller books costs at least every 10 seconds. A control plane, disks, and network
    traffic are not included.
    """

    job: str
    max_cost_usd: float | None


class Offer(Schema):
    """Machine type that a pool sells in one zone, and its current price."""

    pool: str = ""
    zone: str
    machine_type: str
    spot: bool
    cpus: float
    gpus: int
    price_per_hour: float
    on_demand_price_per_hour: float
    as_of: float = Field(description="Time of the price.")
    source: str
    memory_gb: float | None = None
    gpu: str = Field(default="", description="Name of its GPUs.")
    gpu_memory_gb: float | None = Field(default=None, description="Of one GPU.")

    @property
    def hardware(self) -> Hardware:
        """Hardware of a machine of this type."""
        return Hardware(self.cpus, self.memory_gb, self.gpus, self.gpu, self.gpu_memory_gb)


class OfferView(Offer):
    """An offer of a pool to a job."""

    samples_per_second: float | None
    usd_per_million_samples: float | None
    machines: int = Field(description="Number of machines that the job would buy.")
    excluded: str | None = Field(description="Reason why the job can't buy it.")


class VerdictView(Schema):
    """Usability of a pool for a job, with the reasons if it can't be used."""

    pool: str
    usable: bool
    reasons: list[str]


class TrafficEstimateView(Schema):
    """Estimate of what workers push to the store and fetch from it."""

    total_bytes: float
    between_zones: float | None = Field(
        description="Bytes between zones; null if the store's zone is unknown."
    )
    usd: float | None = Field(description="Price of those, which the cost does not include.")
    assumption: str


class DeadlineEstimate(Schema):
    """Estimate of how a job ends before its deadline; null values are unknown.

    `in_time` is the share of simulated histories of spot machines in which it does, with machines
    on demand bought when the slack is gone. `cost_usd` is the mean over them, and `high_cost_usd`
    is exceeded in one of ten.
    """

    at: float
    slack_seconds: float | None = None
    in_time: float | None = None
    hours: float | None = None
    cost_usd: float | None = None
    high_cost_usd: float | None = None
    on_demand_machine_hours: float | None = None
    text: str


class PlanView(Schema):
    """Estimate of what a job would buy now, and of its cost.

    A value that can't be estimated is null; `remedies` say how to change that.
    """

    machines: int
    usd_per_hour: float
    on_demand_usd_per_hour: float
    hours: float | None
    cost_usd: float | None
    on_demand_cost_usd: float | None
    start_seconds: float | None = Field(
        default=None, description="Time from a machine's launch to its first samples."
    )
    costs_money: bool = Field(
        default=False, description="True if the job's pools may cause a bill."
    )
    offers: list[OfferView]
    pools: list[VerdictView]
    deadline: DeadlineEstimate | None = Field(default=None, description="null without a deadline.")
    traffic: TrafficEstimateView | None = Field(
        default=None, description="null if nothing is known about it, or no pool is in a cloud."
    )
    assumptions: list[str]
    remedies: list[str]


class PlanRequest(RequestBody):
    """A job to plan. Without the other fields, the plan uses measurements of earlier jobs with the
    same name and task."""

    spec: SubmittedSpec
    samples: int | None = Field(default=None, ge=1, le=10**15, description="Samples per epoch.")
    samples_per_second: float | None = Field(
        default=None, gt=0, le=1e15, allow_inf_nan=False, description="Speed of one machine."
    )
    parameters: int | None = Field(
        default=None, ge=1, le=10**15, description="Parameters of the model, for its traffic."
    )


class PoolSpend(Schema):
    """Spending of a pool."""

    pool: str
    machines: int = Field(description="Machines that are currently billed.")
    usd_per_hour: float
    spent_usd: float
    on_demand_usd: float
    offers: list[Offer] | None = Field(description="null until prices are known.")


class SpendView(Schema):
    """Current cost of all machines per hour, and cost of all jobs so far."""

    usd_per_hour: float
    on_demand_usd_per_hour: float
    month_usd: float = Field(default=0.0, description="Cost in this calendar month (UTC).")
    monthly_budget_usd: float | None = Field(default=None, description="null: none.")
    spent_usd: float
    on_demand_usd: float
    saved_usd: float
    pools: list[PoolSpend]
