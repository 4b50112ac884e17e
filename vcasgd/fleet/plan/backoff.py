"""How launches are named, and how long who refused is left alone."""

from __future__ import annotations

import uuid

#: beyond this many doublings any delay has reached its limit
_MOST_DOUBLINGS = 30


def launch_token(cluster: str, market: str, launches: int) -> str:
    """The same for the same launch; a UUID, because that is what every cloud takes."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"vcasgd/{cluster}/{market}/{launches}"))


def market_name(pool: str, zone: str | None, spot: bool | None) -> str:
    """Under which a market's launches are counted; the pool's own name where all is open."""
    if zone is None:
        return pool
    return f"{pool}/{zone}/{'spot' if spot else 'on-demand'}"


def backoff(failures: int, base: float, limit: float) -> float:
    """Seconds to leave a pool alone after so many refusals in a row: base, 2·base, … limit."""
    if failures <= 0:
        return 0.0
    return float(min(limit, base * 2 ** min(failures - 1, _MOST_DOUBLINGS)))
