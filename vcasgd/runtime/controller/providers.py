"""Where machines come from."""

from __future__ import annotations

from vcasgd.fleet.providers.base import Provider
from vcasgd.fleet.providers.local import LocalPool, LocalProvider
from vcasgd.settings import Settings

#: the one pool that this machine plays
LOCAL_POOL = "local"


def providers_of(settings: Settings) -> dict[str, Provider]:
    """The provider of each pool, by the pool's name."""
    pool = LocalPool(
        LOCAL_POOL,
        settings.local_capacity,
        price_per_hour=settings.local_price_per_hour,
        on_demand_price_per_hour=settings.local_on_demand_price_per_hour,
        boot_seconds=settings.local_boot_seconds,
        notice_seconds=settings.local_notice_seconds,
    )
    return {LOCAL_POOL: LocalProvider(settings.home_path, settings.cluster, pool)}
