"""Pools and their providers, as the pools file defines them at present."""

from __future__ import annotations

import logging

from vcasgd.errors import FleetError, SpecError
from vcasgd.fleet.pools import JOIN, JOINING_PROVIDERS, ORDERED_PROVIDERS, PoolSpec
from vcasgd.fleet.providers.base import Provider
from vcasgd.fleet.providers.join.provider import JoinedFleet
from vcasgd.fleet.providers.registry import configured_pools, make_providers
from vcasgd.settings import Settings

log = logging.getLogger(__name__)


class PoolRegistry:
    """The pools by name (``specs``) and their providers (``providers``).

    An edited pools file takes effect with the next :meth:`refresh`. A file that is no longer valid
    changes nothing and is logged.
    """

    def __init__(self, settings: Settings, joined: JoinedFleet | None = None) -> None:
        """Read the file. ``joined``: the machines that joined by themselves.

        Raises :class:`SpecError`, and :class:`FleetError` if a cloud's credentials are missing.
        """
        self._settings = settings
        self._joined = joined
        self._read = self._stamp()
        self.specs: dict[str, PoolSpec] = {}
        self.providers: dict[str, Provider] = {}
        #: Providers that were replaced and are still open.
        self.replaced: list[Provider] = []
        self._replace(configured_pools(settings))

    def refresh(self) -> bool:
        """Read the file again if it was edited. Return True if the pools changed."""
        stamp = self._stamp()
        if stamp == self._read:
            return False
        self._read = stamp
        try:
            self._replace(configured_pools(self._settings))
        except (SpecError, FleetError) as error:
            log.error("%s; the pools stay as they were", error)
            return False
        log.info("reloaded the pools file: %s", ", ".join(self.specs))
        return True

    @property
    def only_local(self) -> bool:
        """True if no machine of any pool causes a bill."""
        return all(pool.provider in ("local", JOIN) for pool in self.specs.values())

    @property
    def only_joined(self) -> bool:
        """True if the machines of all pools join through the gateway, so that Ray has none."""
        return all(pool.provider in JOINING_PROVIDERS for pool in self.specs.values())

    def _replace(self, pools: tuple[PoolSpec, ...]) -> None:
        ordered = [each.provider for each in pools if each.provider in ORDERED_PROVIDERS]
        if self._settings.join_url is None and ordered:
            raise SpecError(
                f"machines of {ordered[0]} pools have no address where they can join",
                remedy="set VCASGD_JOIN_PORT",
                field="VCASGD_JOIN_PORT",
            )
        providers = make_providers(self._settings, pools, self._joined)
        self.replaced += dict.fromkeys(self.providers.values())
        self.specs, self.providers = {pool.name: pool for pool in pools}, providers

    def _stamp(self) -> tuple[int, int] | None:
        if self._settings.pools is None:
            return None
        try:
            status = self._settings.pools.stat()
        except OSError:
            return (0, 0)
        return status.st_mtime_ns, status.st_size
