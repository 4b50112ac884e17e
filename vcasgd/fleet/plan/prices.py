"""Value of machines: the price of a sample, measured or estimated from the machine's size."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from vcasgd.fleet.observed import Rates
from vcasgd.fleet.providers.base import Offer

#: Number of processors that a GPU counts as before anything is measured. It only affects the order
#: of types that no job has tried yet.
CPUS_PER_GPU = 64.0


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
