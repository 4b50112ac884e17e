"""What EC2 asks for spot machines now."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

_PAGE = 1000


class SpotPrice(NamedTuple):
    """USD per hour, and since when it is valid (Unix seconds)."""

    per_hour: float
    since: float


#: by type and zone; what is not sold in a zone is not in it
Prices = Mapping[tuple[str, str], SpotPrice]


class SpotPrices:
    """Asks EC2 for prices, and remembers them for ``seconds``.

    ``ask`` is EC2's DescribeSpotPriceHistory.
    """

    def __init__(
        self,
        ask: Callable[..., Any],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[tuple[str, ...], tuple[float, Prices]] = {}

    def of(self, kinds: Sequence[str], zones: Sequence[str]) -> Prices:
        """Raises :class:`~vcasgd.errors.FleetError`."""
        key = (*kinds, "", *zones)
        with self._lock:
            until, prices = self._known.get(key, (0.0, {}))
            if self._clock() >= until:
                prices = self._fetch(kinds, zones)
                self._known[key] = self._clock() + self._seconds, prices
            return prices

    def _fetch(self, kinds: Sequence[str], zones: Sequence[str]) -> Prices:
        asked: dict[str, Any] = {
            "InstanceTypes": list(kinds),
            "ProductDescriptions": ["Linux/UNIX"],
            # from now on: just the prices that are valid now
            "StartTime": datetime.now(UTC),
            "MaxResults": _PAGE,
        }
        newest: dict[tuple[str, str], SpotPrice] = {}
        while True:
            answer = self._ask(**asked)
            for row in answer["SpotPriceHistory"]:
                where = row["InstanceType"], row["AvailabilityZone"]
                price = SpotPrice(float(row["SpotPrice"]), row["Timestamp"].timestamp())
                if where[1] in zones and price.since >= newest.get(where, (0.0, 0.0))[1]:
                    newest[where] = price
            if not answer.get("NextToken"):
                return newest
            asked["NextToken"] = answer["NextToken"]
