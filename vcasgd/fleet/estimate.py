"""Estimate of what a job would buy now, its duration, and its cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vcasgd.errors import SpecError
from vcasgd.fleet import deadline
from vcasgd.fleet.observed import (
    JobDemand,
    ObservationTimes,
    Observed,
    PoolStatus,
    highest_price,
)
from vcasgd.fleet.plan.decide import make_plan
from vcasgd.fleet.plan.purchases import price_of
from vcasgd.fleet.pools import pools_of_job
from vcasgd.fleet.traffic import bytes_per_sample, described, traffic
from vcasgd.schemas.costs import (
    DeadlineEstimate,
    Offer,
    OfferView,
    PlanView,
    TrafficEstimateView,
    VerdictView,
    Workload,
)
from vcasgd.spec.hardware import kinds_text, shortfalls, suits
from vcasgd.spec.job import JobSpec

#: Name of the planned job; no real job can have it.
_PLANNED = "-"
#: Days after which a price is old: those of clouds change rarely, but budgets rely on them.
MAX_PRICE_DAYS = 365.0
#: Time limit for a machine to join, where a pool doesn't say.
BOOT_SECONDS = 300.0
#: First assumption of a plan that has to wait.
WAITS = "all machines are in use now: the job waits until these are free"


@dataclass(frozen=True)
class PlannedWork(Workload):
    """Measurements of earlier jobs, and what the user says instead.

    ``samples_given``: the user gave ``samples``. ``rate_given``, samples per second of one machine,
    replaces ``rates``, and ``parameters`` replaces ``bytes_per_sample``.
    """

    samples_given: bool = False
    rate_given: float | None = None
    parameters: int | None = None

    def rate(self, offer: Offer) -> float | None:
        """Return samples per second of one machine, or None if unknown."""
        if self.rate_given is not None:
            return self.rate_given
        return self.speeds.get((offer.pool, offer.machine_type))


def estimate(
    spec: JobSpec,
    pools: Sequence[PoolStatus],
    workload: PlannedWork,
    now: float,
    *,
    vacant: Sequence[PoolStatus] = (),
    store_zone: str | None = None,
) -> PlanView:
    """Estimate what a job would buy at ``now`` (Unix seconds).

    Money is without the costs of a control plane, disks, and traffic. Raises :class:`SpecError` for
    a deadline that has passed, or that can't be kept.

    ``pools`` are all pools with their remaining room, and ``vacant`` the same pools without any
    machine in use.
    """
    kinds = {pool.name: pool.kinds for pool in pools}
    named = pools_of_job(spec, pools, kinds)
    demand = _demand(spec, named, pools, workload)
    bought, waits = _bought(demand, pools, now), False
    if not bought and (later := _bought(demand, vacant, now)):
        pools, bought, waits = vacant, later, True
    by_name = {pool.name: pool for pool in pools}
    rows = [
        row
        for name in named
        if name in by_name
        for row in _rows(by_name[name], demand, bought, workload, now)
    ]
    verdicts = [_verdict(name, spec, by_name.get(name), demand, now) for name in named]
    machines = sum(bought.values())
    with_spares = 1 + spec.workers.spare / max(machines, 1)
    per_hour = with_spares * sum(row.price_per_hour * row.machines for row in rows)
    risk_free = with_spares * sum(row.on_demand_price_per_hour * row.machines for row in rows)
    hours = _hours(spec, rows, workload, machines)
    moved = _traffic(spec, workload, rows, pools, store_zone)
    ends = deadline_estimate(spec, [by_name[name] for name in demand.pools], workload, now)
    assumptions = [
        *_assumptions(spec, workload, machines, hours, per_hour),
        *_old_prices([row for row in rows if row.machines], now),
    ]
    if moved is not None:
        assumptions.append(described(moved, store_zone))
    return PlanView(
        offers=rows,
        pools=verdicts,
        machines=machines,
        usd_per_hour=per_hour,
        on_demand_usd_per_hour=risk_free,
        hours=hours,
        cost_usd=None if hours is None else hours * per_hour,
        on_demand_cost_usd=None if hours is None else hours * risk_free,
        start_seconds=workload.start_seconds,
        assumptions=[WAITS] * waits + assumptions,
        remedies=_remedies(spec, workload, machines, rows),
        costs_money=any(by_name[name].costs_money for name in named if name in by_name),
        traffic=moved,
        deadline=ends,
    )


def deadline_estimate(
    spec: JobSpec, pools: Sequence[PoolStatus], workload: PlannedWork, now: float
) -> DeadlineEstimate | None:
    """Estimate how a job that is submitted at ``now`` ends before its deadline, if it has one.

    ``pools`` are those that the job may use. Raises :class:`SpecError` as :func:`estimate`.
    """
    at = spec.deadline(now)
    if at is None:
        return None
    field = "finish_by" if spec.finish_by else "within"
    if at <= now:
        raise SpecError(
            f"{field}: {spec.finish_by} has passed", remedy="give a time in the future", field=field
        )
    offers = [
        each
        for pool in pools
        for each in pool.offers or ()
        if suits(spec.resources, (each.hardware,))
    ]
    given = workload.rate_given
    rates = {(each.pool, each.machine_type): given for each in offers} if given else workload.speeds
    best, samples = deadline.cheapest(offers, rates), total_samples(spec, workload)
    if best is None or samples is None:
        return DeadlineEstimate(at=at, text=deadline.outlook_text(None))
    offer, rate = best
    room = sum(float("inf") if pool.capacity is None else pool.capacity for pool in pools)
    work = deadline.Work(
        seconds=samples / rate,
        left=(1 - deadline.END_PART) * (at - now),
        places=max(1, int(min(spec.workers.max, room))),
        delay=deadline.delay_of(
            ((pool.provider, pool.boot_seconds or BOOT_SECONDS) for pool in pools),
            workload.start_seconds,
        ),
        spot_price=price_of(offer, spot=offer.spot),
        on_demand_price=price_of(offer, spot=False),
    )
    return deadline.estimated(work, at, field)


def _traffic(
    spec: JobSpec,
    workload: PlannedWork,
    rows: Sequence[OfferView],
    pools: Sequence[PoolStatus],
    store_zone: str | None,
) -> TrafficEstimateView | None:
    samples = total_samples(spec, workload)
    per_sample = bytes_per_sample(
        spec,
        parameters=workload.parameters,
        measured=workload.bytes_per_sample,
        samples=workload.samples,
        batch_size=workload.batch_size,
    )
    providers = {pool.name: pool.provider for pool in pools}
    # Only clouds charge for it.
    if per_sample is None or samples is None or set(providers.values()) <= {"", "local"}:
        return None
    return traffic(per_sample, samples, rows, providers, store_zone)


def _demand(
    spec: JobSpec, named: Sequence[str], pools: Sequence[PoolStatus], workload: PlannedWork
) -> JobDemand:
    workers = spec.workers
    cleared = {pool.name for pool in pools if pool.labels.issuperset(spec.required_labels)}
    # The budget limits the time of these machines; the assumptions report that.
    return JobDemand(
        job=_PLANNED,
        minimum=workers.min,
        maximum=workers.max,
        pools=tuple(name for name in named if name in cleared),
        wants=spec.known_subtasks or spec.workers.max,
        running=True,
        on_demand_minimum=workers.on_demand_min,
        max_price=workers.max_price_per_hour,
        rates=workload.speeds,
        resources=spec.resources,
        saves=spec.deadline(0.0) is not None and any(p.spot for p in pools if p.name in named),
    )


def _bought(
    demand: JobDemand, pools: Sequence[PoolStatus], now: float
) -> Counter[tuple[str, str, str, bool]]:
    """Count machines by pool, zone, type, and spot. Of equally good types, the cheapest counts."""
    state = Observed(
        ledger=_PLANNED, machines=(), nodes=frozenset(), workers=(), jobs=(demand,),
        pools=tuple(pools), history=ObservationTimes(since=now),
    )  # fmt: skip
    offers = {pool.name: pool.offers or () for pool in pools}
    bought: Counter[tuple[str, str, str, bool]] = Counter()
    for launch in make_plan(state, now).launches:
        spot, fitting = launch.spot, launch.matching(offers[launch.pool])
        best = min(fitting, key=lambda each: (price_of(each, spot=spot), each.machine_type))
        bought[launch.pool, launch.zone, best.machine_type, spot] += launch.count
    return bought


def _rows(
    pool: PoolStatus,
    demand: JobDemand,
    bought: Counter[tuple[str, str, str, bool]],
    workload: PlannedWork,
    now: float,
) -> list[OfferView]:
    rows = []
    for offer in pool.offers or ():
        for spot in {offer.spot, False} if offer.spot else {False}:
            count = bought[pool.name, offer.zone, offer.machine_type, spot]
            # On-demand machines of a spot pool are listed only if they are bought.
            if count or spot == offer.spot:
                rows.append(_row(pool, offer, demand, workload, now, spot=spot, count=count))
    return sorted(rows, key=lambda row: (row.price_per_hour, row.zone, row.spot))


def _row(
    pool: PoolStatus,
    offer: Offer,
    demand: JobDemand,
    workload: PlannedWork,
    now: float,
    *,
    spot: bool,
    count: int,
) -> OfferView:
    price, rate = price_of(offer, spot=spot), workload.rate(offer)
    own = {
        "spot": spot,
        "price_per_hour": price,
        "machines": count,
        "samples_per_second": rate,
        "usd_per_million_samples": price / 3600 / rate * 1e6 if rate else None,
        "excluded": None if count else _excluded(pool, offer, demand, price, now, spot=spot),
    }
    return OfferView.model_validate({**vars(offer), **own})


def _excluded(
    pool: PoolStatus, offer: Offer, demand: JobDemand, price: float, now: float, *, spot: bool
) -> str | None:
    market, limit = pool.market(offer.zone, spot), highest_price(pool, demand)
    if pool.name not in demand.pools:
        return "its pool is excluded"
    if price > limit:
        return f"costs more than the maximum of {limit:g} USD/h"
    wanted = demand.resources
    if wanted is not None and (fields := shortfalls(wanted, offer.hardware)):
        given = wanted.given()
        asked = " and ".join(f"resources.{each}: {given[each]}" for each in fields)
        return f"it has {offer.hardware}, and the job asks for {asked}"
    if market.blocked_until > now:
        return market.reason or "it refused recently"
    return None


def _verdict(
    name: str,
    spec: JobSpec,
    pool: PoolStatus | None,
    demand: JobDemand,
    now: float,
) -> VerdictView:
    if pool is None:
        return VerdictView(pool=name, usable=False, reasons=["no such pool"])
    reasons = []
    if missing := [label for label in spec.required_labels if label not in pool.labels]:
        reasons.append(f"may not see {', '.join(missing)}")
    if pool.blocked_until > now:
        reasons.append(pool.reason or "it refused recently")
    if pool.capacity is not None and pool.capacity <= 0:
        reasons.append("all of its machines are in use")
    if pool.joined and not suits(demand.resources, pool.kinds):
        reasons.append(f"its machines have {kinds_text(pool.kinds)}")
    if pool.offers is None:
        reasons.append(pool.reason or "its prices are unknown")
    elif offers := [_excluded(pool, each, demand, price_of(each, spot=each.spot), now,
                              spot=each.spot) for each in pool.offers]:  # fmt: skip
        if not reasons and all(offers):
            reasons += sorted({each for each in offers if each})
    elif not reasons:
        reasons.append("it offers no machines now")
    return VerdictView(pool=name, usable=not reasons, reasons=reasons)


def _hours(
    spec: JobSpec, rows: Sequence[OfferView], workload: PlannedWork, machines: int
) -> float | None:
    taken = [row for row in rows if row.machines]
    samples = total_samples(spec, workload)
    if not machines or samples is None:
        return None
    rates = [row.samples_per_second for row in taken]
    speed = sum(row.machines * (row.samples_per_second or 0.0) for row in taken)
    if any(rate is None for rate in rates) or speed <= 0:
        return None
    return ((workload.start_seconds or 0.0) + samples / speed) / 3600


def total_samples(spec: JobSpec, workload: Workload) -> int | None:
    """Return the samples that the job applies, or None if unknown."""
    if spec.max_samples is not None:
        return spec.max_samples
    number = spec.max_steps or spec.epochs or 0
    each = workload.batch_size if spec.max_steps else workload.samples
    return None if each is None else number * each


def _assumptions(
    spec: JobSpec, workload: PlannedWork, machines: int, hours: float | None, per_hour: float
) -> list[str]:
    lines = [f"{machines} of at most {spec.workers.max} machines run from start to end"]
    if spec.workers.spare:
        lines.append(f"workers.spare: {spec.workers.spare} more run without work, at their price")
    if workload.rate_given is not None:
        lines.append(f"each trains {workload.rate_given:g} samples/s, as given")
    elif workload.rates:
        lines.append("each trains samples at the rate measured before")
    if spec.epochs is not None and workload.samples is not None:
        source = "as given" if workload.samples_given else "as in an earlier job"
        lines.append(f"{spec.epochs} epochs of {workload.samples} samples, {source}")
    if spec.max_steps is not None and workload.batch_size is not None:
        lines.append(f"{spec.length} of {workload.batch_size} samples, as in an earlier job")
    if needed := memory_text(workload.memory_bytes, workload.gpu_memory_bytes):
        lines.append(f"each needs about {needed}, as in an earlier job")
    left_out = "evaluations, evictions, and traffic between zones are not included"
    if workload.start_seconds is None:
        left_out = f"booting, {left_out}"
    else:
        start = deadline.span(max(1.0, workload.start_seconds))
        lines.append(f"each trains {start} after its launch, as in an earlier job")
    lines.append(f"prices stay constant; {left_out}")
    budget = spec.stop.max_cost_usd
    if budget is not None and hours is not None and hours * per_hour > budget:
        part = budget / (hours * per_hour)
        lines.append(
            f"the budget of {budget:g} USD is spent after {part:.0%}, and the job is paused"
        )
    limit = spec.stop.max_duration
    if limit is not None and hours is not None and hours * 3600 > limit.total_seconds():
        lines.append(f"stop.max_duration ends the job after {limit.total_seconds() / 3600:g} h")
    return lines


def _old_prices(bought: Sequence[OfferView], now: float) -> list[str]:
    """Say how old prices are that may have changed since."""
    days = {row.machine_type: (now - row.as_of) // 86400 for row in bought}
    return [
        f"the price of {kind} is {age:.0f} days old: compare it with the cloud's, and correct it "
        "in a file (VCASGD_PRICES)"
        for kind, age in days.items()
        if age > MAX_PRICE_DAYS
    ]


def memory_text(memory_bytes: int | None, gpu_memory_bytes: int | None) -> str:
    """Return the memory of a worker for people; empty if it is unknown."""
    parts = [
        f"{count / 1e9:.2f} GB {what}"
        for count, what in ((memory_bytes, "of memory"), (gpu_memory_bytes, "of its GPU"))
        if count
    ]
    return " and ".join(parts)


def _remedies(
    spec: JobSpec, workload: PlannedWork, machines: int, rows: Sequence[OfferView]
) -> list[str]:
    if not machines:
        return ["nothing can be bought now; see the reasons for each pool above"]
    remedies = []
    needed = (workload.memory_bytes or 0) / 1e9
    small = {
        row.machine_type for row in rows if row.machines and (row.memory_gb or needed) < needed
    }
    if small:
        remedies.append(
            f"machines of type {', '.join(sorted(small))} have less memory than a worker used "
            f"before: set resources.memory to {needed:.1f}GB or more"
        )
    if spec.epochs is not None and workload.samples is None:
        remedies.append("the number of samples in an epoch is unknown: give it")
    if spec.max_steps is not None and workload.batch_size is None:
        remedies.append(
            "the number of samples in a step is unknown until a job with this name and task runs"
        )
    if any(row.machines and row.samples_per_second is None for row in rows):
        remedies.append(
            "the speed of these machines is unknown: give the samples per second of one "
            "machine, or run some steps, which measure them for the next plan with this name and "
            "task"
        )
    return remedies
