"""Names of launches and markets."""

from __future__ import annotations

import uuid


def launch_token(cluster: str, market: str, launches: int) -> str:
    """The same for the same launch; a UUID, because that is what every cloud takes."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"vcasgd/{cluster}/{market}/{launches}"))


def market_name(pool: str, zone: str | None, spot: bool | None) -> str:
    """Under which a market's launches are counted; the pool's own name where all is open."""
    if zone is None:
        return pool
    return f"{pool}/{zone}/{'spot' if spot else 'on-demand'}"
