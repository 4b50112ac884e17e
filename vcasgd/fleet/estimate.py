"""What a job would buy now, how long it would take and what it would cost: before it buys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from vcasgd.fleet.observed import (
    JobDemand,
    LaunchCounts,
    Observed,
    PoolView,
    Rates,
    highest_price,
)
from vcasgd.fleet.plan import Launch, decide
from vcasgd.fleet.plan.prices import price_of
from vcasgd.fleet.providers.base import Offer
from vcasgd.spec.job import JobSpec

#: the job that is planned; no real one has such a name
_PLANNED = "-"
#: the first assumption of a plan for later
WAITS = "all machines are in use now: the job waits for these to be free"


@dataclass(frozen=True)
class Known:
    """What is known of the work: samples of an epoch, samples a second of one machine (by pool
    and type, or as somebody says of all), and where each number is from."""

    samples: int | None = None
    rates: Rates | None = None
    samples_given: bool = False
    rate_given: float | None = None

    def rate(self, offer: Offer) -> float | None:
        if self.rate_given is not None:
            return self.rate_given
        return (self.rates or {}).get((offer.pool, offer.instance_type))


@dataclass(frozen=True)
class PlanRow:
    """An offer, how many of it would be bought, or why none."""

    offer: Offer
    spot: bool
    price_per_hour: float
    machines: int
    samples_per_second: float | None
    usd_per_million_samples: float | None
    excluded: str | None


@dataclass(frozen=True)
class Verdict:
    """Whether a pool is of use to the job, and if not, why."""

    pool: str
    usable: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Estimate:
    """``None``: not known, and a remedy says how it would be. Money in USD, without what a
    control plane, disks and traffic cost."""

    offers: tuple[PlanRow, ...]
    pools: tuple[Verdict, ...]
    machines: int
    usd_per_hour: float
    on_demand_usd_per_hour: float
    hours: float | None
    cost_usd: float | None
    on_demand_cost_usd: float | None
    assumptions: tuple[str, ...]
    remedies: tuple[str, ...]


def estimate(
    spec: JobSpec,
    pools: Sequence[PoolView],
    labels: Mapping[str, frozenset[str]],
    known: Known,
    now: float,
    *,
    vacant: Sequence[PoolView] = (),
) -> Estimate:
    """``pools``: all that there are, with the room that is left in them; ``vacant``: the same if
    nobody used any of their machines; ``labels``: which each may see."""
    demand = _demand(spec, labels, {pool.name for pool in pools}, known)
    bought, waits = _bought(demand, pools, now), False
    if not bought and (later := _bought(demand, vacant, now)):
        pools, bought, waits = vacant, later, True
    by_name = {pool.name: pool for pool in pools}
    rows = tuple(
        row
        for name in spec.workers.pools
        if name in by_name
        for row in _rows(by_name[name], demand, bought, known, now)
    )
    verdicts = tuple(
        _verdict(name, spec, by_name.get(name), labels, demand, now) for name in spec.workers.pools
    )
    machines = sum(bought.values())
    per_hour = sum(row.price_per_hour * row.machines for row in rows)
    risk_free = sum(row.offer.on_demand_price_per_hour * row.machines for row in rows)
    hours = _hours(spec, rows, known, machines)
    told = _assumptions(spec, known, machines, hours, per_hour)
    return Estimate(
        offers=rows,
        pools=verdicts,
        machines=machines,
        usd_per_hour=per_hour,
        on_demand_usd_per_hour=risk_free,
        hours=hours,
        cost_usd=None if hours is None else hours * per_hour,
        on_demand_cost_usd=None if hours is None else hours * risk_free,
        assumptions=((WAITS,) if waits else ()) + tuple(told),
        remedies=tuple(_remedies(known, machines, rows)),
    )


def _demand(
    spec: JobSpec,
    labels: Mapping[str, frozenset[str]],
    pools: Container[str],
    known: Known,
) -> JobDemand:
    wanted, workers = frozenset(spec.required_labels), spec.workers
    named = [name for name in workers.pools if name in pools]
    # the budget bounds how long these machines work, which the assumptions tell
    return JobDemand(
        job=_PLANNED,
        minimum=workers.min,
        maximum=workers.max,
        pools=tuple(name for name in named if wanted <= labels.get(name, frozenset())),
        wants=spec.total_subtasks,
        running=True,
        on_demand_minimum=workers.on_demand_min,
        max_price=workers.max_price_per_hour,
        rates=known.rates or {},
    )


def _bought(
    demand: JobDemand, pools: Sequence[PoolView], now: float
) -> Counter[tuple[str, str, str, bool]]:
    """By pool, zone, type and whether it is spot. Where several types are as good, the cheapest
    stands for all."""
    state = Observed(
        cluster=_PLANNED, instances=(), nodes=frozenset(), workers=(), jobs=(demand,),
        pools=tuple(pools), history=LaunchCounts(since=now),
    )  # fmt: skip
    offers = {pool.name: pool.offers or () for pool in pools}
    bought: Counter[tuple[str, str, str, bool]] = Counter()
    for action in decide(state, now):
        if isinstance(action, Launch) and action.zone is not None:
            spot = bool(action.spot)
            fitting = [
                each
                for each in offers[action.pool]
                if each.zone == action.zone and each.instance_type in (action.instance_types or ())
            ]
            best = min(fitting, key=lambda each: (price_of(each, spot=spot), each.instance_type))
            bought[action.pool, action.zone, best.instance_type, spot] += action.count
    return bought


def _rows(
    pool: PoolView,
    demand: JobDemand,
    bought: Counter[tuple[str, str, str, bool]],
    known: Known,
    now: float,
) -> list[PlanRow]:
    rows = []
    for offer in pool.offers or ():
        for spot in {offer.spot, False} if offer.spot else {False}:
            count = bought[pool.name, offer.zone, offer.instance_type, spot]
            # what nobody asked for without the risk is no row of its own
            if count or spot == offer.spot:
                rows.append(_row(pool, offer, demand, known, now, spot=spot, count=count))
    return sorted(rows, key=lambda row: (row.price_per_hour, row.offer.zone, row.spot))


def _row(
    pool: PoolView,
    offer: Offer,
    demand: JobDemand,
    known: Known,
    now: float,
    *,
    spot: bool,
    count: int,
) -> PlanRow:
    price, rate = price_of(offer, spot=spot), known.rate(offer)
    return PlanRow(
        offer=offer,
        spot=spot,
        price_per_hour=price,
        machines=count,
        samples_per_second=rate,
        usd_per_million_samples=price / 3600 / rate * 1e6 if rate else None,
        excluded=None if count else _excluded(pool, offer, demand, price, now, spot=spot),
    )


def _excluded(
    pool: PoolView, offer: Offer, demand: JobDemand, price: float, now: float, *, spot: bool
) -> str | None:
    market, limit = pool.market(offer.zone, spot), highest_price(pool, demand)
    if pool.name not in demand.pools:
        return "its pool falls out"
    if price > limit:
        return f"costs more than the maximum of {limit:g} USD/h"
    if market.blocked_until > now:
        return market.reason or "refused lately"
    return None


def _verdict(
    name: str,
    spec: JobSpec,
    pool: PoolView | None,
    labels: Mapping[str, frozenset[str]],
    demand: JobDemand,
    now: float,
) -> Verdict:
    if pool is None:
        return Verdict(name, False, ("there is no such pool",))
    reasons = []
    if missing := [each for each in spec.required_labels if each not in labels.get(name, ())]:
        reasons.append(f"may not see {', '.join(missing)}")
    if pool.blocked_until > now:
        reasons.append(pool.reason or "refused lately")
    if pool.capacity is not None and pool.capacity <= 0:
        reasons.append("all of its machines are in use")
    if pool.offers is None:
        reasons.append(pool.reason or "its prices are not known")
    elif offers := [_excluded(pool, each, demand, price_of(each, spot=each.spot), now,
                              spot=each.spot) for each in pool.offers]:  # fmt: skip
        if not reasons and all(offers):
            reasons += sorted({each for each in offers if each})
    elif not reasons:
        reasons.append("sells nothing at the moment")
    return Verdict(name, not reasons, tuple(reasons))


def _hours(spec: JobSpec, rows: Sequence[PlanRow], known: Known, machines: int) -> float | None:
    taken = [row for row in rows if row.machines]
    if not machines or known.samples is None:
        return None
    rates = [row.samples_per_second for row in taken]
    speed = sum(row.machines * (row.samples_per_second or 0.0) for row in taken)
    if any(rate is None for rate in rates) or speed <= 0:
        return None
    return spec.epochs * known.samples / speed / 3600


def _assumptions(
    spec: JobSpec, known: Known, machines: int, hours: float | None, per_hour: float
) -> list[str]:
    told = [f"{machines} of at most {spec.workers.max} machines, from the first minute to the last"]
    if known.rate_given is not None:
        told.append(f"each trains {known.rate_given:g} samples/s, as given")
    elif known.rates:
        told.append("each trains as many samples/s as were measured before")
    if known.samples is not None:
        source = "as given" if known.samples_given else "as an earlier job had"
        told.append(f"{spec.epochs} epochs of {known.samples} samples, {source}")
    told.append("prices stay; booting, evaluations and what evictions cost are not in it")
    budget = spec.stop.max_cost_usd
    if budget is not None and hours is not None and hours * per_hour > budget:
        part = budget / (hours * per_hour)
        told.append(f"the budget of {budget:g} USD ends after {part:.0%}: the job will be paused")
    limit = spec.stop.max_duration
    if limit is not None and hours is not None and hours * 3600 > limit.total_seconds():
        told.append(f"stop.max_duration ends it after {limit.total_seconds() / 3600:g} h")
    return told


def _remedies(known: Known, machines: int, rows: Sequence[PlanRow]) -> list[str]:
    if not machines:
        return ["nothing could be bought now; the pools above say why"]
    remedies = []
    if known.samples is None:
        remedies.append("the samples of an epoch are not known: give them with --samples")
    if any(row.machines and row.samples_per_second is None for row in rows):
        remedies.append(
            "nobody has measured how fast these machines are: give --samples-per-second of one, "
            "or let an epoch run; the next plan for this name and task knows"
        )
    return remedies
