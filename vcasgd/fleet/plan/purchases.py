"""Purchases: room, price, zone, type, and budget decide what is bought for a job."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isinf
from statistics import median

from vcasgd.fleet.observed import JobDemand, Observed, PoolStatus, Rates, highest_price
from vcasgd.fleet.plan import Launch, launch_token, market_name
from vcasgd.schemas.costs import Offer
from vcasgd.spec.hardware import suits

#: Largest premium, as a share of the cheapest price of a sample, for spreading over zones and for
#: more types to choose from. In recorded traces of spot machines, most losses take at least half
#: of a zone's fleet, which then has to boot again.
SPREAD_PREMIUM = 0.25

#: Number of processors that a GPU counts as before anything is measured. It only affects the order
#: of types that no job has tried yet.
CPUS_PER_GPU = 64.0

#: Content of one launch: pool, zone, types, spot.
_Order = tuple[str, str, tuple[str, ...], bool]


@dataclass(frozen=True, order=True)
class _Zone:
    """Zone in which a job can buy. ``price``: the highest of ``types``, in USD per hour."""

    score: float
    """Lowest cost of a sample."""
    name: str
    types: tuple[str, ...]
    price: float


class Markets:
    """All markets; keeps track of what is promised in this round."""

    def __init__(self, state: Observed, blamed: Iterable[tuple[str, str, bool]], now: float):
        self._state = state
        self._now = now
        self._pools = {pool.name: pool for pool in state.pools}
        self._blamed = set(blamed)
        self._room = self._rooms()
        self._zones = Counter((one.pool, one.zone) for one in state.staying())
        self._left = {job.job: job.affordable for job in state.jobs}
        # Prices and refusals stay the same during a round.
        self._zones_of: dict[tuple[str, str, bool], list[_Zone]] = {}
        self._refusals_of: dict[tuple[str, str], list[float | None]] = {}
        self._orders: defaultdict[_Order, list[str]] = defaultdict(list)

    def buy(self, job: JobDemand, spots: Sequence[bool], *, last_resort: bool) -> bool:
        """Order one machine from the first of the job's pools that has a suitable one.

        ``spots``: whether it may be spot, on demand, or both. ``last_resort`` adds on-demand
        machines if the job allows a fallback and its spot pools have refused for long enough.
        Returns False if no pool has a machine.
        """
        pools = [self._pools[name] for name in job.pools if name in self._pools]
        if True not in spots:
            return any(self._buy_in(pool, job, spot=False) for pool in pools)
        also_firm = False in spots and not job.saves
        if any(self._buy_in(pool, job, spot=pool.spot) for pool in pools if pool.spot or also_firm):
            return True
        if False not in spots or not last_resort or not self.fallback_due(job):
            return False
        return any(self._buy_in(pool, job, spot=False) for pool in pools if pool.spot or job.saves)

    def sells_spot(self, job: JobDemand) -> bool:
        """Return True if a spot machine could be requested now."""
        pools = [self._pools[name] for name in job.pools if name in self._pools]
        return any(
            self._has_room(pool, spot=True) and self._good_zones(pool, job, spot=True)
            for pool in pools
            if pool.spot and pool.blocked_until <= self._now
        )

    def fallback_due(self, job: JobDemand) -> bool:
        """Return True if all suitable spot markets have refused for ``fallback_after``.

        Markets that are full or too expensive don't count: they were never available.
        """
        if job.fallback_after is None or isinf(job.fallback_after):
            return False
        since = [
            at
            for name in job.pools
            if (pool := self._pools.get(name)) and pool.spot and self._has_room(pool, spot=True)
            for at in self._refusals(pool, job)
        ]
        return all(at is not None and self._now - at >= job.fallback_after for at in since)

    def launches(self) -> list[Launch]:
        """Return the launches in the order of the pools, each with its own token."""
        used: Counter[str] = Counter()
        launches = []
        position = {pool.name: index for index, pool in enumerate(self._state.pools)}
        for order, jobs in sorted(self._orders.items(), key=lambda each: position[each[0][0]]):
            pool, zone, types, spot = order
            name = market_name(pool, zone, spot)
            number = self._pools[pool].market(zone, spot).launches + used[name]
            used[name] += 1
            token = launch_token(self._state.ledger, name, number)
            launches.append(Launch(pool, len(jobs), token, zone, types, spot, tuple(jobs)))
        return launches

    # -- one pool ------------------------------------------------------------------------------

    def _buy_in(self, pool: PoolStatus, job: JobDemand, *, spot: bool) -> bool:
        if pool.blocked_until > self._now or not self._has_room(pool, spot=spot):
            return False
        zones = self._good_zones(pool, job, spot=spot)
        if not zones:
            return False
        chosen = min(zones, key=lambda each: (self._zones[pool.name, each.name], each))
        if not self._pay(job, chosen.price):
            return False
        self._room[pool.name, spot] -= 1
        self._room[pool.name, None] -= 1
        self._zones[pool.name, chosen.name] += 1
        self._orders[pool.name, chosen.name, chosen.types, spot].append(job.job)
        return True

    def _good_zones(self, pool: PoolStatus, job: JobDemand, *, spot: bool) -> list[_Zone]:
        """Return the zones with an open, affordable offer that is sufficiently cheap."""
        key = pool.name, job.job, spot
        if key not in self._zones_of:
            offers = self._affordable_offers(pool, job, spot)
            open_ = [each for each in offers if self._open(pool, each.zone, spot)]
            self._zones_of[key] = _zones(scores(open_, job.rates, spot=spot), spot=spot)
        return self._zones_of[key]

    def _affordable_offers(self, pool: PoolStatus, job: JobDemand, spot: bool) -> list[Offer]:
        limit = highest_price(pool, job)
        return [
            each
            for each in pool.offers or ()
            if price_of(each, spot=spot) <= limit and suits(job.resources, (each.hardware,))
        ]

    def _open(self, pool: PoolStatus, zone: str, spot: bool) -> bool:
        if (pool.name, zone, spot) in self._blamed:
            return False
        return pool.market(zone, spot).blocked_until <= self._now

    def _refusals(self, pool: PoolStatus, job: JobDemand) -> list[float | None]:
        """Return since when each zone with an affordable spot offer has refused, or None."""
        key = pool.name, job.job
        if key not in self._refusals_of:
            zones = {each.zone for each in self._affordable_offers(pool, job, True)}
            self._refusals_of[key] = [self._refused_since(pool, zone) for zone in zones]
        return self._refusals_of[key]

    def _refused_since(self, pool: PoolStatus, zone: str) -> float | None:
        zoned, whole = pool.market(zone, spot=True).refused_since, pool.refused_since
        return min((at for at in (zoned, whole) if at is not None), default=None)

    # -- room and money ------------------------------------------------------------------------

    def _has_room(self, pool: PoolStatus, *, spot: bool) -> bool:
        return self._room[pool.name, None] > 0 and self._room[pool.name, spot] > 0

    def _rooms(self) -> dict[tuple[str, bool | None], float]:
        """Return how many machines may be requested, by pool, and by pool and spot or on demand."""
        held = Counter((one.pool, one.spot) for one in self._state.occupying())
        rooms: dict[tuple[str, bool | None], float] = {}
        for pool in self._state.pools:
            staying = held[pool.name, True] + held[pool.name, False]
            capacity = float("inf") if pool.capacity is None else pool.capacity
            rooms[pool.name, None] = capacity - staying - pool.launching
            for spot in (True, False):
                quota = pool.quotas.get(spot, float("inf"))
                coming = pool.launching_of(spot=spot)
                rooms[pool.name, spot] = quota - held[pool.name, spot] - coming
        return rooms

    def _pay(self, job: JobDemand, price: float) -> bool:
        """Reserve the minimum cost of a machine. Returns False if the budget doesn't cover it."""
        left = self._left[job.job]
        if left is None:
            return True
        limits = self._state.limits
        cost = price * max(limits.billing_seconds, limits.exit_seconds) / 3600
        if cost > left:
            return False
        self._left[job.job] = left - cost
        return True


def _zones(choices: Mapping[Offer, float], *, spot: bool) -> list[_Zone]:
    """Return the zones of the offers that cost at most :data:`SPREAD_PREMIUM` too much.

    ``choices``: offers with the cost of a sample.
    """
    most = min(choices.values(), default=0.0) * (1 + SPREAD_PREMIUM)
    by_zone: defaultdict[str, list[Offer]] = defaultdict(list)
    for offer, score in choices.items():
        if score <= most:
            by_zone[offer.zone].append(offer)
    return [
        _Zone(
            score=min(choices[each] for each in offers),
            name=zone,
            types=tuple(sorted({each.machine_type for each in offers})),
            price=max(price_of(each, spot=spot) for each in offers),
        )
        for zone, offers in by_zone.items()
    ]


def price_of(offer: Offer, *, spot: bool) -> float:
    """Return USD per hour for the machine as spot or on demand."""
    return offer.price_per_hour if spot == offer.spot else offer.on_demand_price_per_hour


def scores(offers: Iterable[Offer], rates: Rates, *, spot: bool) -> dict[Offer, float]:
    """Return USD per hour for each sample per second.

    A type without measurements is assumed to be as fast for its size as the median of the measured
    ones in the same pool. Without any measurement, only the order is meaningful.
    """
    offers = list(offers)
    measured = [rate / size(each) for each in offers if (rate := _rate(each, rates)) is not None]
    typical = median(measured) if measured else 1.0
    return {
        each: price_of(each, spot=spot) / (_rate(each, rates) or size(each) * typical)
        for each in offers
    }


def size(offer: Offer) -> float:
    """Return the size of a machine in processors."""
    return max(offer.cpus + CPUS_PER_GPU * offer.gpus, 1e-3)


def _rate(offer: Offer, rates: Rates) -> float | None:
    rate = rates.get((offer.pool, offer.machine_type))
    return rate if rate is not None and rate > 0 else None
