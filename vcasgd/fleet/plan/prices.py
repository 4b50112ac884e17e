"""What a machine is worth: the price of a measured sample, and of a guessed one before that."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from vcasgd.fleet.observed import Rates
from vcasgd.fleet.providers.base import Offer

#: with nothing measured a GPU counts as so many processors; it only orders types that nobody
#: has tried yet
CPUS_PER_GPU = 64.0


def price_of(offer: Offer, *, spot: bool) -> float:
    """USD an hour; a pool of spot machines also sells the same without the risk."""
    return offer.price_per_hour if spot == offer.spot else offer.on_demand_price_per_hour


def scores(offers: Iterable[Offer], rates: Rates, *, spot: bool) -> dict[Offer, float]:
    """USD an hour for each sample a second.

    Types that nobody has measured are taken to be as fast for their size as the measured ones of
    the same pool are in the median; with none measured only the order means something.
    """
    offers = list(offers)
    measured = [rate / size(each) for each in offers if (rate := _rate(each, rates)) is not None]
    typical = median(measured) if measured else 1.0
    return {
        each: price_of(each, spot=spot) / (_rate(each, rates) or size(each) * typical)
        for each in offers
    }


def size(offer: Offer) -> float:
    """In processors."""
    return max(offer.cpus + CPUS_PER_GPU * offer.gpus, 1e-3)


def _rate(offer: Offer, rates: Rates) -> float | None:
    rate = rates.get((offer.pool, offer.instance_type))
    return rate if rate is not None and rate > 0 else None
