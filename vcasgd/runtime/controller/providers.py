"""Where machines come from: the pools, as their file says now."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from vcasgd.errors import SpecError
from vcasgd.fleet.pools import LocalPoolSpec, PoolSpec, load_pools
from vcasgd.fleet.providers.base import Provider
from vcasgd.fleet.providers.local import LocalPool, LocalProvider
from vcasgd.settings import Settings

log = logging.getLogger(__name__)


def providers_of(settings: Settings, pools: Iterable[PoolSpec]) -> dict[str, Provider]:
    """The provider of each pool, by the pool's name. Raises :class:`SpecError`."""
    return {pool.name: _provider(settings, pool) for pool in pools}


def _provider(settings: Settings, pool: PoolSpec) -> Provider:
    if isinstance(pool, LocalPoolSpec):
        return LocalProvider(settings.home_path, settings.cluster, _local(settings, pool))
    raise SpecError(
        f"pools: provider {pool.provider} of pool {pool.name} is not installed", field="pools"
    )


def _local(settings: Settings, pool: LocalPoolSpec) -> LocalPool:
    """What the template leaves open is as the settings say."""
    given = pool.template.model_dump(exclude_none=True)
    usual = {
        "price_per_hour": settings.local_price_per_hour,
        "on_demand_price_per_hour": settings.local_on_demand_price_per_hour,
        "boot_seconds": settings.local_boot_seconds,
        "notice_seconds": settings.local_notice_seconds,
    }
    return LocalPool(
        pool.name,
        settings.local_capacity if pool.max_instances is None else pool.max_instances,
        spot=pool.spot,
        zones=pool.zones,
        instance_types=pool.instance_types,
        cpus=pool.cpus or 1.0,
        gpus=pool.gpus or 0,
        **{**usual, **given},
    )


class Estate:
    """The pools and their providers; a file that was edited counts from the next round on.

    One that can't be read any more changes nothing, and the log says so.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises :class:`SpecError`."""
        self._settings = settings
        self._read = self._stamp()
        self.pools: dict[str, PoolSpec] = {}
        self.providers: dict[str, Provider] = {}
        self._take(load_pools(settings.pools))

    def refresh(self) -> bool:
        """Whether the pools are other ones than before."""
        stamp = self._stamp()
        if stamp == self._read:
            return False
        self._read = stamp
        try:
            self._take(load_pools(self._settings.pools))
        except SpecError as error:
            log.error("%s; the pools stay as they were", error)
            return False
        log.info("the pools file was read again: %s", ", ".join(self.pools))
        return True

    def _take(self, pools: tuple[PoolSpec, ...]) -> None:
        providers = providers_of(self._settings, pools)
        for old in {id(each): each for each in self.providers.values()}.values():
            old.close()
        self.pools, self.providers = {pool.name: pool for pool in pools}, providers

    def _stamp(self) -> tuple[int, int] | None:
        if self._settings.pools is None:
            return None
        try:
            found = self._settings.pools.stat()
        except OSError:
            return (0, 0)
        return found.st_mtime_ns, found.st_size
