"""What the clouds say of machines and prices, asked no more often than they like."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.errors import FleetError, VcasgdError
from vcasgd.fleet.providers.base import Instance, Offer, Provider

log = logging.getLogger(__name__)

#: between two listings of machines; clouds throttle who asks more often, this computer does not
LIST_SECONDS = {"local": 0.0}
LIST_SECONDS_IN_CLOUDS = 5.0
#: between two looks at prices; who asks a cloud for them remembers them for longer
OFFERS_SECONDS = 2.0
#: after a look that failed
RETRY_SECONDS = 30.0


@dataclass
class _Offers:
    offers: tuple[Offer, ...] | None
    problem: str | None
    due: float


class CloudCache:
    """Remembers what each provider said last; one that can't be reached has its machines still."""

    def __init__(self, estate: PoolRegistry) -> None:
        self._estate = estate
        self._machines: dict[int, tuple[float, list[Instance]]] = {}
        self._offers: dict[str, _Offers] = {}
        self._from: dict[str, Provider] = {}
        self._boot_errors: dict[str, tuple[float, str | None]] = {}

    def forget(self) -> None:
        """The pools are other ones, or something was asked of them: look again."""
        self._machines = {key: (0.0, known) for key, (_, known) in self._machines.items()}

    def forget_prices(self) -> None:
        self._offers = {}

    def instances(self, now: float) -> list[Instance]:
        """Raises :class:`FleetError` where a provider could never be asked: nothing is known of
        its machines then, which is not the same as that there are none."""
        providers = {id(each): each for each in self._estate.providers.values()}
        self._machines = {key: known for key, known in self._machines.items() if key in providers}
        for provider in providers.values():
            self._list(provider, now)
        listed = [one for _, known in self._machines.values() for one in known]
        there = {one.id for one in listed}
        self._boot_errors = {id_: each for id_, each in self._boot_errors.items() if id_ in there}
        return listed

    def provider_of(self, instance: str) -> Provider | None:
        """That listed it."""
        return self._from.get(instance)

    def boot_error(self, one: Instance, now: float) -> str | None:
        """What the machine said of its boot that failed."""
        due, known = self._boot_errors.get(one.id, (0.0, None))
        provider = self._from.get(one.id)
        if now < due or provider is None:
            return known
        try:
            known = provider.boot_error(one.id)
        except FleetError as error:
            log.warning("%s: its boot can't be asked for: %s", one.id, error)
        period = LIST_SECONDS.get(provider.name, LIST_SECONDS_IN_CLOUDS)
        self._boot_errors[one.id] = now + period, known
        return known

    def offers(self, pool: str, now: float) -> tuple[tuple[Offer, ...] | None, str | None]:
        """Of a pool, ``None`` where it was never told; and what is wrong, if anything is."""
        known = self._offers.get(pool)
        if known is None or now >= known.due:
            known = self._offers[pool] = self._ask(pool, known, now)
        return known.offers, known.problem

    def _list(self, provider: Provider, now: float) -> None:
        due, known = self._machines.get(id(provider), (0.0, None))
        if now < due:
            return
        try:
            found = provider.instances()
        except FleetError as error:
            if known is None:
                raise
            log.warning("%s: its machines can't be listed: %s", provider.name, error)
            found = known
        self._from |= dict.fromkeys((one.id for one in found), provider)
        due = now + LIST_SECONDS.get(provider.name, LIST_SECONDS_IN_CLOUDS)
        self._machines[id(provider)] = (due, found)

    def _ask(self, pool: str, known: _Offers | None, now: float) -> _Offers:
        provider = self._estate.providers[pool]
        try:
            return _Offers(tuple(provider.offers(pool)), None, now + OFFERS_SECONDS)
        except VcasgdError as error:
            log.warning("%s: no prices: %s", pool, error)
            return _Offers(known.offers if known else None, str(error), now + RETRY_SECONDS)
