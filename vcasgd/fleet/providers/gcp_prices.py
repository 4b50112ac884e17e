"""Prices of Compute Engine from Google's public catalog.

It has a price for each core, gibibyte, and GPU of a family in a region. A machine costs their sum.
https://cloud.google.com/billing/docs/reference/rest/v1/services.skus
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vcasgd.errors import CloudUnavailable
from vcasgd.fleet.pools import GcpPoolSpec
from vcasgd.fleet.prices import PriceTable, Told, is_price
from vcasgd.fleet.providers.gcp_calls import attempt, session
from vcasgd.spec.hardware import Hardware

CATALOG = "https://cloudbilling.googleapis.com"
#: Compute Engine in the catalog.
_PATH = "/v1/services/6F81-5844-456A/skus"
#: Seconds for all pages of the catalog, of which there are about ten.
CATALOG_SECONDS = 30.0

_USAGES = ("OnDemand", "Preemptible")
#: The resource of a SKU, without its usage type and region: "N2 Instance Core", "Nvidia L4 GPU".
_WHAT = re.compile(
    "(?:Spot Preemptible )?(.+?)(?: attached to Spot Preemptible VMs)? running in .+"
)
#: Names of families that aren't like "N2 Instance", and of GPUs that aren't like "Nvidia L4".
_FAMILIES = {"c2": "Compute optimized", "n1": "N1 Predefined Instance", "n2d": "N2D AMD Instance"}
_GPUS = {
    ("A100", 40.0): "Nvidia Tesla A100",
    ("A100", 80.0): "Nvidia Tesla A100 80GB",
    ("H100", 80.0): "Nvidia H100 80GB",
}

#: USD per hour by region, usage, and what is priced.
_Rates = dict[tuple[str, str, str], float]


def catalog_prices(pools: Sequence[GcpPoolSpec], table: PriceTable, url: str | None) -> Told:
    """Return the prices of the pools' types. ``table`` knows their sizes.

    A type is left out unless the catalog has all of its parts. ``url`` replaces Google's own.
    Raises :class:`~vcasgd.errors.FleetError`.
    """
    regions = {pool.region for pool in pools}
    rates = attempt(lambda: _rates(_skus(url), regions))
    on_demand, spot = Told({region: {} for region in regions}, {region: {} for region in regions})
    for region, kind in {(pool.region, kind) for pool in pools for kind in pool.machine_types}:
        parts = _parts(kind, table.price(region, kind).hardware)
        with contextlib.suppress(KeyError):
            on_demand[region][kind], spot[region][kind] = (
                round(sum(count * rates[region, usage, what] for what, count in parts.items()), 6)
                for usage in _USAGES
            )
    return Told(on_demand, spot)


def _parts(kind: str, size: Hardware) -> dict[str, float]:
    family = kind.partition("-")[0]
    name = _FAMILIES.get(family, f"{family.upper()} Instance")
    # Tables keep tenths of gigabytes.
    gibibytes = round((size.memory_gb or 0.0) * 1e9 / 2**30, 1)
    parts = {f"{name} Core": size.cpus, f"{name} Ram": gibibytes}
    if size.gpus:
        gpu = _GPUS.get((size.gpu, size.gpu_memory_gb or 0.0), f"Nvidia {size.gpu}")
        parts[f"{gpu} GPU"] = size.gpus
    return parts


def _rates(skus: Iterable[dict[str, Any]], regions: set[str]) -> _Rates:
    rates: _Rates = {}
    for sku in skus:
        what, here = _WHAT.fullmatch(sku.get("description", "")), sku.get("serviceRegions", ())
        # Some have no price.
        with contextlib.suppress(LookupError):
            usage = sku["category"]["usageType"]
            # The newest price, and the last tier, which has no free units.
            tier = sku["pricingInfo"][0]["pricingExpression"]["tieredRates"][-1]["unitPrice"]
            price = int(tier.get("units", 0)) + tier.get("nanos", 0) / 1e9
            if what and is_price(price):
                rates |= {(region, usage, what[1]): price for region in regions & {*here}}
    return rates


def _skus(url: str | None) -> Iterator[dict[str, Any]]:
    page, deadline = "", time.monotonic() + CATALOG_SECONDS
    with session(url) as http:
        while (left := deadline - time.monotonic()) > 0:
            request = {"pageSize": "5000", "pageToken": page}
            answer = http.get(f"{url or CATALOG}{_PATH}", params=request, timeout=left)
            answer.raise_for_status()
            document = answer.json()
            yield from document.get("skus", ())
            if not (page := document.get("nextPageToken", "")):
                return
    raise CloudUnavailable(f"Google's price catalog took more than {CATALOG_SECONDS:g} s")
