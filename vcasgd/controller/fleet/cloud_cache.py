"""Cache of machines and prices, so that providers are not polled more often than they allow."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from typing import Any, Generic, TypeVar

from vcasgd.controller.fleet.cloud_calls import CallKind, CloudCalls
from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.errors import CloudUnavailable, FleetError, VcasgdError
from vcasgd.fleet.plan import Blame
from vcasgd.fleet.providers.base import Provider
from vcasgd.schemas.costs import Offer
from vcasgd.schemas.fleet import Machine

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds between two lists of machines from a provider; clouds throttle frequent callers.
LIST_SECONDS = {"local": 0.0, "join": 0.0}
LIST_SECONDS_IN_CLOUDS = 5.0
#: Seconds between two requests for prices; providers of clouds cache them for longer.
OFFERS_SECONDS = 2.0
#: Seconds before a request for prices that failed is repeated.
RETRY_SECONDS = 30.0
#: Seconds between two requests for the boot report of a machine, and most of them in a second on
#: average, where each is a call: Google allows a project 25 calls that read.
BOOT_REPORT_SECONDS, BOOT_REPORTS_PER_SECOND = 5.0, {"gcp": 4.0}
#: Seconds after which a list without a launched machine means that it was never launched, and its
#: market is left alone for a while.
LAUNCH_UNLISTED_SECONDS = 60.0
NEVER_APPEARED = "never appeared; it may have been cancelled"
#: Seconds for which the provider of a pool must list no machine of it until the pool is forgotten.
#: A launch whose answer was lost with its controller is listed long before.
VACATED_SECONDS = 600.0
#: Seconds that a round waits for new lists and prices. Later ones count from the next round on.
ANSWER_SECONDS = 0.5


@dataclass
class _Answer(Generic[T]):
    """Last answer to a request that is repeated. Times are those of the cache's clock."""

    value: T
    began: float | None = None
    """When the request began that was answered last; None if the value is that of an earlier
    provider or process."""
    problem: str | None = None
    """Why the last request failed, if it did."""
    due: float = float("-inf")


class CloudCache:
    """The last answer of each provider.

    The machines of a provider that is unavailable are those that it listed last, in this process or
    in an earlier one (``known``). A launched machine is in :meth:`unlisted` until its provider
    lists it.
    """

    def __init__(
        self,
        pools: PoolRegistry,
        calls: CloudCalls,
        known: Iterable[Machine],
        clock: Callable[[], float],
    ) -> None:
        self._pools = pools
        self._calls = calls
        self._clock = clock
        self._listings: dict[Provider[Any], _Answer[list[Machine]]] = {}
        #: Machines of removed pools whose provider can't be reached; they may still run.
        self._orphans = list(known)
        #: When a machine of each pool was last seen, or the pool itself for the first time.
        self._occupied_at: dict[str, float] = {}
        self._unlisted: dict[str, tuple[Machine, float]] = {}
        self._lapsed: list[Machine] = []
        self._offers: dict[str, _Answer[tuple[Offer, ...] | None]] = {}
        self._provider_of: dict[str, Provider[Any]] = {}
        self._boots: dict[str, _Answer[str | None]] = {}
        #: Machines that launches under way may get, and the jobs that will pay for them, by token.
        self._orders: dict[str, list[tuple[Machine, str | None]]] = {}
        #: Machines that are being ended, and when their provider has confirmed it, if it has.
        self._ending: dict[str, float | None] = {}
        self._changed_at = float("-inf")

    def refresh(self) -> None:
        """Request what is due, wait a moment, and take the answers of all calls that are done.

        Raises :class:`~vcasgd.errors.StoreError` as :meth:`CloudCalls.collect` does.
        """
        providers = dict.fromkeys(self._pools.providers.values())
        for gone in self._listings.keys() - providers.keys():
            self._orphans += self._listings.pop(gone).value
        for provider in providers:
            if provider not in self._listings:
                self._listings[provider] = _Answer(self._adopt(provider))
            self._request_list(provider)
        for pool in self._pools.specs:
            self._request_offers(pool)
        self._calls.collect(ANSWER_SECONDS, CallKind.LIST, CallKind.PRICES)

    def invalidate_offers(self) -> None:
        """Request prices again, because the pools changed."""
        self._offers = {}

    def unknown(self, pool: str) -> str | None:
        """Return why a pool can't be judged yet, as text for users, or None."""
        listing = self._listings[self._pools.providers[pool]]
        if listing.began is None:
            why = listing.problem
            return (
                f"its machines can't be listed: {why}" if why else "its machines are not listed yet"
            )
        return "its prices are not known yet" if self._offers[pool].began is None else None

    # -- machines ------------------------------------------------------------------------------

    def machines(self) -> list[Machine]:
        """Return the machines of all pools as of the last :meth:`refresh`."""
        listed = self._listed()
        names = {one.id for one in listed}
        self._ending = {id_: each for id_, each in self._ending.items() if id_ in names}
        self._provider_of = {id_: each for id_, each in self._provider_of.items() if id_ in names}
        for id_, (one, at) in list(self._unlisted.items()):
            if id_ in names:
                del self._unlisted[id_]
            elif self._lists(one.pool, at + LAUNCH_UNLISTED_SECONDS):
                del self._unlisted[id_]
                self._lapsed.append(one)
        return listed

    def problem(self, one: Machine) -> str | None:
        """Return why it is unknown whether a machine of a removed pool still runs, if it is."""
        if one.pool in self._pools.specs:
            return None
        provider = self._pools.providers.get(one.pool) or self._provider_of.get(one.id)
        if provider is not None and provider in self._listings:
            return self._listings[provider].problem
        return self._pools.problems.get(one.pool, "the configuration of its pool is not known")

    @property
    def complete(self) -> bool:
        """True once each provider has listed its machines, or has failed to."""
        listings = [self._listings.get(each) for each in self._pools.providers.values()]
        return all(each and (each.problem or each.began is not None) for each in listings)

    def vacated(self) -> list[str]:
        """Return the pools that have had no machines for long enough."""
        now, stored = self._clock(), self._pools.stored
        self._occupied_at = {each: self._occupied_at.get(each, now) for each in stored}
        for one in (*self._listed(), *self.coming()):
            if one.pool in stored:
                self._occupied_at[one.pool] = now
        return [
            pool
            for pool, at in self._occupied_at.items()
            if now - at >= VACATED_SECONDS and self._lists(pool)
        ]

    def _lists(self, pool: str, since: float = float("-inf")) -> bool:
        """Return True if the last list of a pool's provider began after then, and was answered."""
        provider = self._pools.providers.get(pool)
        listing = None if provider is None else self._listings.get(provider)
        if listing is None or listing.began is None or listing.problem is not None:
            return False
        return listing.began > since

    def has(self, machine: str) -> bool:
        """Return True if a provider has listed a machine."""
        return machine in self._provider_of

    def provider_of(self, machine: str) -> Provider[Any]:
        """Return the provider of a machine. Raises :class:`FleetError`."""
        provider = self._provider_of.get(machine)
        if provider is not None and provider in self._listings:
            return provider
        pool = next((one.pool for one in self._listed() if one.id == machine), None)
        if pool is None:
            raise FleetError(
                f"{machine}: no provider lists this machine",
                remedy="see vcasgd machines for those that run",
            )
        if (provider := self._pools.providers.get(pool)) is not None:
            return provider
        raise FleetError(
            f"{machine}: the provider of its pool {pool} can't be reached: "
            f"{self._pools.problems.get(pool, 'the pool is not known')}",
            remedy="restore the access, or end the machine at its provider",
        )

    def check(self, provider: Provider[Any]) -> None:
        """Raise :class:`CloudUnavailable` if a provider could not list its machines last time.

        It may be called by any thread.
        """
        listing = self._listings.get(provider)
        if listing is not None and listing.problem is not None:
            raise CloudUnavailable(
                f"{provider.name} does not list its machines: {listing.problem}",
                remedy="try again when it does",
            )

    def launched(self, machines: Iterable[Machine]) -> None:
        """Add machines that a provider granted and may not list yet."""
        self._unlisted |= {one.id: (one, self._clock()) for one in machines}
        self._list_again()

    def coming(self) -> list[Machine]:
        """Return the machines that are ordered, or granted and not listed yet."""
        return [*self.unlisted(), *self.ordered()]

    def unlisted(self) -> list[Machine]:
        """Return the launched machines that no provider lists yet."""
        return [one for one, _ in self._unlisted.values()]

    def take_lapsed(self) -> list[Blame]:
        """Return the launched machines that count as never launched since the last call."""
        lapsed, self._lapsed = self._lapsed, []
        return [Blame(one.id, one.pool, one.zone, one.spot, NEVER_APPEARED) for one in lapsed]

    def held(self, pool: str, *, spot: bool) -> int:
        """Return the number of a pool's machines of a kind, with those not listed or granted yet.

        Launches under way may be granted although a later one was refused.
        """
        return sum(
            (one.pool, one.spot) == (pool, spot) and one.state.stays
            for one in (*self._listed(), *self.coming())
        )

    def order(self, token: str, machines: Sequence[Machine], jobs: Sequence[str]) -> None:
        """Add the machines that a launch may get, until :meth:`forget_order`."""
        self._orders[token] = list(zip_longest(machines, jobs))

    def forget_order(self, token: str) -> None:
        """Remove a launch that was answered."""
        self._orders.pop(token, None)

    def ordered(self, job: str | None = None) -> list[Machine]:
        """Return the machines that launches under way may get, all or those for a job."""
        orders = chain.from_iterable(self._orders.values())
        return [one for one, payer in orders if job in (None, payer)]

    @property
    def ending(self) -> frozenset[str]:
        """Machines that are being ended, or that can't be, because their provider is not there."""
        return frozenset(self._ending).union(one.id for one in self._orphans)

    def end(self, machines: Iterable[str]) -> None:
        """Add machines that a provider is asked to end."""
        self._ending |= dict.fromkeys(machines)

    def ended(self, machines: Iterable[str], *, confirmed: bool) -> None:
        """Take the provider's answer. Without its confirmation, the machines stay."""
        for id_ in machines:
            if confirmed:
                self._ending[id_] = self._clock()
            else:
                self._ending.pop(id_, None)
        self._list_again()

    def boot_errors(self, booting: Sequence[Machine]) -> dict[str, str]:
        """Return what these machines last reported about failed boots; request what is due."""
        self._boots = {one.id: self._boots.get(one.id) or _Answer(None) for one in booting}
        now, owners = self._clock(), Counter(map(self._provider_of.get, self._boots))
        for id_, boot in self._boots.items():
            provider = self._provider_of.get(id_)
            if provider is not None and now >= boot.due:
                call, take = partial(provider.boot_error, id_), partial(_take_report, boot)
                if self._calls.start(CallKind.BOOT_REPORT, provider, id_, call, take):
                    rate = BOOT_REPORTS_PER_SECOND.get(provider.name, float("inf"))
                    boot.due = now + max(BOOT_REPORT_SECONDS, owners[provider] / rate)
        return {id_: boot.value for id_, boot in self._boots.items() if boot.value is not None}

    def offers(self, pool: str) -> tuple[tuple[Offer, ...] | None, str | None]:
        """Return the offers of a pool and the present problem, if any.

        The offers are None if the provider has never answered.
        """
        cached = self._offers[pool]
        return cached.value, cached.problem

    # -- requests and answers ------------------------------------------------------------------

    def _listed(self) -> list[Machine]:
        listed = [one for each in self._listings.values() for one in each.value]
        return [*listed, *self._orphans]

    def _adopt(self, provider: Provider[Any]) -> list[Machine]:
        """Return machines of a new provider that an earlier one listed."""
        adopted = [one for one in self._orphans if self._is_of(one, provider)]
        self._orphans = [one for one in self._orphans if not self._is_of(one, provider)]
        self._provider_of |= dict.fromkeys((one.id for one in adopted), provider)
        return adopted

    def _is_of(self, one: Machine, provider: Provider[Any]) -> bool:
        pools, before = self._pools, self._provider_of.get(one.id)
        if one.pool in pools.providers or one.pool in pools.removed:
            return pools.providers.get(one.pool) is provider
        # Its pool is not known, but a provider has listed it by the cluster's tag.
        return before is not None and before.name == provider.name

    def _list_again(self) -> None:
        self._changed_at = self._clock()
        for listing in self._listings.values():
            listing.due = float("-inf")

    def _request_list(self, provider: Provider[Any]) -> None:
        began = self._clock()
        if began >= self._listings[provider].due:
            take = partial(self._take_list, provider, began)
            self._calls.start(CallKind.LIST, provider, "", provider.machines, take)

    def _take_list(
        self, provider: Provider[Any], began: float, call: Future[list[Machine]]
    ) -> None:
        if provider not in self._listings:
            return
        listing = self._listings[provider]
        period = LIST_SECONDS.get(provider.name, LIST_SECONDS_IN_CLOUDS)
        # What changed during the call may be missing from its answer.
        listing.due = self._clock() + period if began >= self._changed_at else float("-inf")
        try:
            machines = call.result()
        except FleetError as error:
            log.warning("%s: the machines can't be listed: %s", provider.name, error)
            listing.problem = str(error)
            return
        # Machines that are as before stay the same objects, which the rest of a round compares.
        before = {one.id: one for one in listing.value}
        machines = [before[one.id] if before.get(one.id) == one else one for one in machines]
        listing.value, listing.began, listing.problem = machines, began, None
        self._provider_of |= dict.fromkeys((one.id for one in machines), provider)
        self._orphans = [one for one in self._orphans if self._provider_of.get(one.id) != provider]
        for one in machines:
            confirmed_at = self._ending.get(one.id)
            if confirmed_at is not None and began > confirmed_at:
                # It is still listed, so the plan decides about it again.
                del self._ending[one.id]

    def _request_offers(self, pool: str) -> None:
        cached = self._offers.setdefault(pool, _Answer(None))
        if self._clock() >= cached.due:
            provider = self._pools.providers[pool]
            call, take = partial(provider.offers, pool), partial(self._take_offers, pool, cached)
            self._calls.start(CallKind.PRICES, provider, pool, call, take)

    def _take_offers(
        self,
        pool: str,
        cached: _Answer[tuple[Offer, ...] | None],
        call: Future[list[Offer]],
    ) -> None:
        cached.began = self._clock()
        cached.due = cached.began + RETRY_SECONDS
        try:
            cached.value, cached.problem = tuple(call.result()), None
            cached.due = self._clock() + OFFERS_SECONDS
        except VcasgdError as error:
            log.warning("%s: no prices: %s", pool, error)
            cached.problem = str(error)


def _take_report(boot: _Answer[str | None], call: Future[str | None]) -> None:
    boot.value = call.result()
