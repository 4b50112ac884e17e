"""Cache of machines and prices, so that providers are not polled more often than they allow."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.errors import FleetError, VcasgdError
from vcasgd.fleet.providers.base import Instance, Offer, Provider

log = logging.getLogger(__name__)

#: Seconds between two lists of machines from a provider; clouds throttle frequent callers.
LIST_SECONDS = {"local": 0.0}
LIST_SECONDS_IN_CLOUDS = 5.0
#: Seconds between two requests for prices; providers of clouds cache them for longer.
OFFERS_SECONDS = 2.0
#: Seconds before a request for prices that failed is repeated.
RETRY_SECONDS = 30.0
#: Seconds after which a launched machine that was never listed counts as never launched.
LAUNCH_UNLISTED_SECONDS = 60.0


@dataclass
class _CachedOffers:
    offers: tuple[Offer, ...] | None
    problem: str | None
    due: float


class CloudCache:
    """The last answer of each provider.

    The machines of a provider that is unavailable are those that it listed last. A launched
    machine is in :meth:`unlisted` until its provider lists it.
    """

    def __init__(self, pools: PoolRegistry) -> None:
        self._pools = pools
        self._machines: dict[int, tuple[float, list[Instance]]] = {}
        self._unlisted: dict[str, tuple[Instance, float]] = {}
        self._offers: dict[str, _CachedOffers] = {}
        self._provider_of: dict[str, Provider] = {}
        self._boot_errors: dict[str, tuple[float, str | None]] = {}

    def invalidate(self) -> None:
        """List machines again at the next request, because the controller changed some."""
        self._machines = {key: (0.0, machines) for key, (_, machines) in self._machines.items()}

    def invalidate_offers(self) -> None:
        """Request prices again, because the pools changed."""
        self._offers = {}

    def launched(self, machines: Iterable[Instance], now: float) -> None:
        """Add machines that a provider granted and may not list yet."""
        self._unlisted |= {one.id: (one, now) for one in machines}
        self.invalidate()

    def unlisted(self) -> list[Instance]:
        """Return the launched machines that no provider lists yet."""
        return [one for one, _ in self._unlisted.values()]

    def instances(self, now: float) -> list[Instance]:
        """Return the machines of all pools.

        Raises :class:`FleetError` if a provider has never answered: unknown machines are not the
        same as no machines.
        """
        providers = {id(each): each for each in self._pools.providers.values()}
        self._machines = {key: each for key, each in self._machines.items() if key in providers}
        for provider in providers.values():
            self._list(provider, now)
        listed = [one for _, machines in self._machines.values() for one in machines]
        names = {one.id for one in listed}
        self._boot_errors = {id_: each for id_, each in self._boot_errors.items() if id_ in names}
        self._unlisted = {
            id_: (one, at)
            for id_, (one, at) in self._unlisted.items()
            if id_ not in names and now - at < LAUNCH_UNLISTED_SECONDS
        }
        return listed

    def provider_of(self, instance: str) -> Provider | None:
        """Return the provider that listed a machine."""
        return self._provider_of.get(instance)

    def boot_error(self, one: Instance, now: float) -> str | None:
        """Return what a machine reported about its failed boot, or None."""
        due, text = self._boot_errors.get(one.id, (0.0, None))
        provider = self._provider_of.get(one.id)
        if now < due or provider is None:
            return text
        try:
            text = provider.boot_error(one.id)
        except FleetError as error:
            log.warning("%s: the boot report can't be read: %s", one.id, error)
        period = LIST_SECONDS.get(provider.name, LIST_SECONDS_IN_CLOUDS)
        self._boot_errors[one.id] = now + period, text
        return text

    def offers(self, pool: str, now: float) -> tuple[tuple[Offer, ...] | None, str | None]:
        """Return the offers of a pool and the present problem, if any.

        The offers are None if the provider has never answered.
        """
        cached = self._offers.get(pool)
        if cached is None or now >= cached.due:
            cached = self._offers[pool] = self._request_offers(pool, cached, now)
        return cached.offers, cached.problem

    def _list(self, provider: Provider, now: float) -> None:
        due, last = self._machines.get(id(provider), (0.0, None))
        if now < due:
            return
        try:
            machines = provider.instances()
        except FleetError as error:
            if last is None:
                raise
            log.warning("%s: the machines can't be listed: %s", provider.name, error)
            machines = last
        self._provider_of |= dict.fromkeys((one.id for one in machines), provider)
        due = now + LIST_SECONDS.get(provider.name, LIST_SECONDS_IN_CLOUDS)
        self._machines[id(provider)] = (due, machines)

    def _request_offers(self, pool: str, last: _CachedOffers | None, now: float) -> _CachedOffers:
        provider = self._pools.providers[pool]
        try:
            return _CachedOffers(tuple(provider.offers(pool)), None, now + OFFERS_SECONDS)
        except VcasgdError as error:
            log.warning("%s: no prices: %s", pool, error)
            return _CachedOffers(last.offers if last else None, str(error), now + RETRY_SECONDS)
