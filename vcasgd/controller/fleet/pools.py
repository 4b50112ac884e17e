"""Where machines come from: the pools, as their file says now."""

from __future__ import annotations

import logging

from vcasgd.errors import FleetError, SpecError
from vcasgd.fleet.pools import PoolSpec
from vcasgd.fleet.providers.base import Provider
from vcasgd.fleet.providers.registry import configured_pools, make_providers
from vcasgd.settings import Settings

log = logging.getLogger(__name__)


class PoolRegistry:
    """The pools and their providers; a file that was edited counts from the next round on.

    One that can't be read any more changes nothing, and the log says so.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises :class:`SpecError`, and :class:`FleetError` where a cloud's credentials lack."""
        self._settings = settings
        self._read = self._stamp()
        self.pools: dict[str, PoolSpec] = {}
        self.providers: dict[str, Provider] = {}
        self._take(configured_pools(settings))

    def refresh(self) -> bool:
        """Whether the pools are other ones than before."""
        stamp = self._stamp()
        if stamp == self._read:
            return False
        self._read = stamp
        try:
            self._take(configured_pools(self._settings))
        except (SpecError, FleetError) as error:
            log.error("%s; the pools stay as they were", error)
            return False
        log.info("the pools file was read again: %s", ", ".join(self.pools))
        return True

    def _take(self, pools: tuple[PoolSpec, ...]) -> None:
        providers = make_providers(self._settings, pools)
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
