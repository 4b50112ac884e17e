"""Current spot prices of EC2."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

_PAGE = 1000


class SpotPrice(NamedTuple):
    """Price in USD per hour, and the start of its validity (Unix seconds)."""

    per_hour: float
    since: float


#: Prices by type and zone, without types that a zone doesn't sell.
Prices = Mapping[tuple[str, str], SpotPrice]


class SpotPrices:
    """Cache of spot prices, valid for ``seconds``.

    ``fetch`` calls EC2's DescribeSpotPriceHistory.
    """

    def __init__(
        self,
        fetch: Callable[..., Any],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetch_page = fetch
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._cached: dict[tuple[str, ...], tuple[float, Prices]] = {}

    def of(self, kinds: Sequence[str], zones: Sequence[str]) -> Prices:
        """Return the prices of types in zones. Raises :class:`~vcasgd.errors.FleetError`."""
        key = (*kinds, "", *zones)
        with self._lock:
            until, prices = self._cached.get(key, (0.0, {}))
            if self._clock() >= until:
                prices = self._fetch(kinds, zones)
                self._cached[key] = self._clock() + self._seconds, prices
            return prices

    def _fetch(self, kinds: Sequence[str], zones: Sequence[str]) -> Prices:
        request: dict[str, Any] = {
            "InstanceTypes": list(kinds),
            "ProductDescriptions": ["Linux/UNIX"],
            # Starting now returns only the current prices.
            "StartTime": datetime.now(UTC),
            "MaxResults": _PAGE,
        }
        newest: dict[tuple[str, str], SpotPrice] = {}
        while True:
            response = self._fetch_page(**request)
            for row in response["SpotPriceHistory"]:
                where = row["InstanceType"], row["AvailabilityZone"]
                price = SpotPrice(float(row["SpotPrice"]), row["Timestamp"].timestamp())
                if where[1] in zones and price.since >= newest.get(where, (0.0, 0.0))[1]:
                    newest[where] = price
            if not response.get("NextToken"):
                return newest
            request["NextToken"] = response["NextToken"]
