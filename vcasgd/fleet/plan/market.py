"""What may be bought for whom: room, price, zone, type, budget."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from vcasgd.fleet.observed import JobDemand, Observed, PoolView, highest_price
from vcasgd.fleet.plan.actions import Launch
from vcasgd.fleet.plan.launch_names import launch_token, market_name
from vcasgd.fleet.plan.prices import price_of, scores
from vcasgd.fleet.providers.base import Offer

#: a zone is still good for the sake of spreading, and a type for the sake of finding room, where
#: a sample costs at most this much more than in the cheapest one; in recorded traces of spot
#: machines most losses take half of a zone's fleet or more, which then has to boot again
SPREAD_PREMIUM = 0.25

#: what is asked for in one call: pool, zone, types, spot
_Ware = tuple[str, str | None, tuple[str, ...] | None, bool | None]


class Markets:
    """All that is for sale; remembers what is promised in this round."""

    def __init__(self, state: Observed, blamed: Iterable[tuple[str, str, bool]], now: float):
        self._state = state
        self._now = now
        self._pools = {pool.name: pool for pool in state.pools}
        self._blamed = set(blamed)
        self._room = self._rooms()
        self._zones = Counter((one.pool, one.zone) for one in state.staying())
        self._left = {job.job: job.affordable for job in state.jobs}
        self._orders: defaultdict[_Ware, list[str]] = defaultdict(list)

    def buy(self, job: JobDemand, *, on_demand: bool, last_resort: bool) -> bool:
        """One machine for the job from the first of its pools that has a fitting one.

        ``on_demand``: only without the risk; ``last_resort``: also without it, where the job
        allows that and its spot pools have refused for long enough.
        """
        pools = [self._pools[name] for name in job.pools if name in self._pools]
        if any(self._buy_in(pool, job, spot=not on_demand and pool.spot) for pool in pools):
            return True
        if on_demand or not last_resort or not self.fallback_due(job):
            return False
        return any(self._buy_in(pool, job, spot=False) for pool in pools if pool.spot)

    def sells_spot(self, job: JobDemand) -> bool:
        """Whether a spot machine could be asked for now."""
        pools = [self._pools[name] for name in job.pools if name in self._pools]
        return any(
            self._has_room(pool, spot=True) and self._choices(pool, job, spot=True)
            for pool in pools
            if pool.spot and pool.blocked_until <= self._now
        )

    def fallback_due(self, job: JobDemand) -> bool:
        """Whether all spot machines that the job would take have been refused for so long as it
        says. What is full, or too dear, was never to be had."""
        if job.fallback_after is None:
            return False
        since = [
            self._refused_since(pool, zone)
            for name in job.pools
            if (pool := self._pools.get(name)) and pool.spot and self._has_room(pool, spot=True)
            for zone in sorted({each.zone for each in self._affordable_offers(pool, job, True)})
        ]
        return all(at is not None and self._now - at >= job.fallback_after for at in since)

    def launches(self) -> list[Launch]:
        """In the order of the pools; each with a token of its own."""
        used: Counter[str] = Counter()
        launches = []
        order = {pool.name: index for index, pool in enumerate(self._state.pools)}
        for ware, jobs in sorted(self._orders.items(), key=lambda each: order[each[0][0]]):
            pool, zone, types, spot = ware
            name = market_name(pool, zone, spot)
            number = self._launches_of(pool, zone, spot) + used[name]
            used[name] += 1
            token = launch_token(self._state.cluster, name, number)
            launches.append(Launch(pool, len(jobs), token, zone, types, spot, tuple(jobs)))
        return launches

    # -- one pool ------------------------------------------------------------------------------

    def _buy_in(self, pool: PoolView, job: JobDemand, *, spot: bool) -> bool:
        if pool.blocked_until > self._now or not self._has_room(pool, spot=spot):
            return False
        if pool.offers is None:
            return self._buy_blindly(pool, job, spot=spot)
        choices = self._choices(pool, job, spot=spot)
        if not choices:
            return False
        zone, offers = self._choose(pool.name, choices)
        price = max(price_of(each, spot=spot) for each in offers)
        if not self._pay(job, price):
            return False
        types = tuple(sorted({each.instance_type for each in offers}))
        self._order(pool, job, zone, types, spot)
        return True

    def _buy_blindly(self, pool: PoolView, job: JobDemand, *, spot: bool) -> bool:
        """Prices are not known yet: nothing is bought for whom they matter."""
        bounded = (pool.max_price, job.max_price, job.affordable)
        if spot != pool.spot or any(limit is not None for limit in bounded):
            return False
        if any(name == pool.name for name, _, _ in self._blamed):
            return False
        self._order(pool, job, None, None, None)
        return True

    def _order(
        self,
        pool: PoolView,
        job: JobDemand,
        zone: str | None,
        types: tuple[str, ...] | None,
        spot: bool | None,
    ) -> None:
        self._room[pool.name, pool.spot if spot is None else spot] -= 1
        self._room[pool.name, None] -= 1
        self._zones[pool.name, zone or ""] += 1
        self._orders[pool.name, zone, types, spot].append(job.job)

    def _choices(self, pool: PoolView, job: JobDemand, *, spot: bool) -> dict[Offer, float]:
        """Offers that are open and not too dear, with what a sample costs."""
        return scores(
            (
                each
                for each in self._affordable_offers(pool, job, spot)
                if self._open(pool, each.zone, spot)
            ),
            job.rates,
            spot=spot,
        )

    def _choose(self, pool: str, choices: dict[Offer, float]) -> tuple[str, list[Offer]]:
        """The emptiest of the zones that are cheap enough, and the types to take there."""
        most = min(choices.values()) * (1 + SPREAD_PREMIUM)
        good = {offer: score for offer, score in choices.items() if score <= most}
        best = {
            zone: min(score for offer, score in good.items() if offer.zone == zone)
            for zone in {offer.zone for offer in good}
        }
        zone = min(best, key=lambda each: (self._zones[pool, each], best[each], each))
        return zone, [offer for offer in good if offer.zone == zone]

    def _affordable_offers(self, pool: PoolView, job: JobDemand, spot: bool) -> list[Offer]:
        limit = highest_price(pool, job)
        return [each for each in pool.offers or () if price_of(each, spot=spot) <= limit]

    def _open(self, pool: PoolView, zone: str, spot: bool) -> bool:
        if (pool.name, zone, spot) in self._blamed:
            return False
        return pool.market(zone, spot).blocked_until <= self._now

    def _refused_since(self, pool: PoolView, zone: str) -> float | None:
        zoned, whole = pool.market(zone, spot=True).refused_since, pool.refused_since
        return min((at for at in (zoned, whole) if at is not None), default=None)

    def _launches_of(self, pool: str, zone: str | None, spot: bool | None) -> int:
        view = self._pools[pool]
        return view.launches if zone is None else view.market(zone, bool(spot)).launches

    # -- room and money ------------------------------------------------------------------------

    def _has_room(self, pool: PoolView, *, spot: bool) -> bool:
        return self._room[pool.name, None] > 0 and self._room[pool.name, spot] > 0

    def _rooms(self) -> dict[tuple[str, bool | None], float]:
        """By pool, and by pool and kind of machine: how many may be asked for."""
        held = Counter((one.pool, one.spot) for one in self._state.staying())
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
        """Sets aside what a machine costs at least, once it was asked for."""
        left = self._left[job.job]
        if left is None:
            return True
        limits = self._state.limits
        cost = price * max(limits.billing_seconds, limits.exit_seconds) / 3600
        if cost > left:
            return False
        self._left[job.job] = left - cost
        return True
