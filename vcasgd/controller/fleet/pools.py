"""Pools and their providers, as the pools file defines them at present."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vcasgd.errors import FleetError, SpecError
from vcasgd.fleet.pools import (
    FREE_PROVIDERS,
    JOINING_PROVIDERS,
    ORDERED_PROVIDERS,
    PoolSpec,
    pool_row,
)
from vcasgd.fleet.providers.base import Provider
from vcasgd.fleet.providers.joining import JoinedFleet
from vcasgd.fleet.providers.registry import (
    configured_pools,
    make_providers,
    make_reachable,
    place_of,
    stored_place,
)
from vcasgd.local_files import write_private
from vcasgd.settings import Settings
from vcasgd.store.ledger.control import Control

log = logging.getLogger(__name__)

#: Seconds before another attempt to reach the provider of a removed pool, or to take over a file
#: that was refused.
RETRY_SECONDS = 60.0
#: File in a stack's home with the cluster's name and the pools that may have machines, for a
#: ``vcasgd down`` without the ledger and without the settings of ``up``.
USED_POOLS = "used-pools.json"


def used_pools(home: Path) -> tuple[str | None, dict[str, Any]]:
    """Return the cluster of a stack, if it is known, and its pools that may have machines."""
    try:
        stored = json.loads((home / USED_POOLS).read_text())
        return str(stored["cluster"]), dict(stored["pools"])
    except FileNotFoundError:
        return None, {}
    except (OSError, ValueError, LookupError, TypeError) as error:
        log.error("%s can't be read: %s", home / USED_POOLS, error)
        return None, {}


class PoolRegistry:
    """The pools by name (``specs``) and their providers (``providers``).

    An edited pools file takes effect with the next :meth:`refresh`. A file that is refused changes
    nothing and is logged.

    ``providers`` also has those of removed pools, because a machine costs money until its provider
    has confirmed its end. The ledger keeps the configuration of each pool that may have machines,
    until :meth:`forget`.
    """

    def __init__(
        self,
        settings: Settings,
        control: Control,
        joined: JoinedFleet | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the file. ``joined``: the machines that joined by themselves.

        Raises :class:`SpecError`, :class:`FleetError` if a cloud's credentials are missing, and
        :class:`~vcasgd.errors.StoreError`.
        """
        self._settings = settings
        self._control = control
        self._joined = joined
        self._clock = clock
        #: State of the file as it was last read, and of the one whose pools these are.
        self._read = self._applied = self._stamp()
        self._retry_at = 0.0
        self.specs: dict[str, PoolSpec] = {}
        self.providers: dict[str, Provider[Any]] = {}
        #: Why providers of removed pools can't be reached, by pool.
        self.problems: dict[str, str] = {}
        #: Providers that were replaced and are still open.
        self.replaced: list[Provider[Any]] = []
        #: Stored configurations of the pools that may have machines.
        self._stored = control.pool_specs()
        self._write_used()
        self._replace(configured_pools(settings))

    def refresh(self) -> bool:
        """Read the file again if it was edited, or was refused a while ago, for example because of
        missing credentials. Return True if the pools changed."""
        stamp, due = self._stamp(), self._clock() >= self._retry_at
        if stamp == self._applied or (stamp == self._read and not due):
            if self.problems and due:
                self._reach_removed()
            return False
        self._read, self._retry_at = stamp, self._clock() + RETRY_SECONDS
        try:
            self._replace(configured_pools(self._settings))
        except (SpecError, FleetError) as error:
            log.error("%s; the pools stay as they were", error)
            if self.problems:
                self._reach_removed()
            return False
        self._applied = stamp
        log.info("reloaded the pools file: %s", ", ".join(self.specs))
        return True

    @property
    def stored(self) -> set[str]:
        """Pools that may have machines."""
        return set(self._stored)

    @property
    def removed(self) -> set[str]:
        """Pools that are not in the file any more and may have machines."""
        return self._stored.keys() - self.specs.keys()

    def remember(self, pools: Iterable[str]) -> None:
        """Store the configurations of pools that have machines, or are about to get some.

        Raises :class:`~vcasgd.errors.StoreError`.
        """
        used = {name: pool_row(self.specs[name]) for name in pools if name in self.specs}
        new = {name: row for name, row in used.items() if self._stored.get(name) != row}
        if new:
            self._control.set_pool_specs(new)
            self._stored |= new
            self._write_used()

    def forget(self, pools: Iterable[str]) -> None:
        """Forget pools that have no machines. Raises :class:`StoreError`."""
        gone = self.stored.intersection(pools)
        if not gone:
            return
        self._control.forget_pool_specs(gone)
        before = set(self.providers.values())
        for name in gone:
            del self._stored[name]
            if name not in self.specs:
                self.providers.pop(name, None)
        self.replaced += before - set(self.providers.values())
        self._write_used()

    @property
    def only_local(self) -> bool:
        """True if no machine of any pool causes a bill."""
        return all(each.name in FREE_PROVIDERS for each in self.providers.values())

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
        for pool in pools:
            self._check_place(pool)
        providers = make_providers(self._settings, pools, self._joined)
        self.replaced += dict.fromkeys(self.providers.values())
        self.specs, self.providers = {pool.name: pool for pool in pools}, providers
        self._reach_removed()

    def _check_place(self, pool: PoolSpec) -> None:
        """Raise :class:`SpecError` if a pool that may have machines has moved.

        Only the new place would list them, so they would run on unseen.
        """
        place, before = place_of(pool), stored_place(self._stored.get(pool.name), pool.name)
        if before not in (None, place):
            was, now = (" ".join(filter(None, each)) for each in (before, place))
            raise SpecError(
                f"pool {pool.name}: it may have machines in {was}, and is in {now} now",
                remedy="give the new pool another name; the machines of the old one are then ended",
                field="pools",
            )

    def _reach_removed(self) -> None:
        """Find or make the providers of removed pools that have none."""
        self._retry_at = self._clock() + RETRY_SECONDS
        known = [(spec, self.providers[name]) for name, spec in self.specs.items()]
        missing = {name: self._stored[name] for name in self.removed - self.providers.keys()}
        made, self.problems = make_reachable(self._settings, missing, self._joined, known)
        self.providers |= made
        for name, problem in self.problems.items():
            log.warning(
                "pool %s was removed and can't be reached: %s; its machines may still run: "
                "restore the access, and they are ended",
                name,
                problem,
            )

    def _write_used(self) -> None:
        if not self._settings.home_path.is_dir():
            return  # There is no stack that could end.
        used = {"cluster": self._settings.cluster, "pools": self._stored}
        try:
            write_private(self._settings.home_path / USED_POOLS, json.dumps(used))
        except OSError as error:  # A full disk must not stop training.
            log.error("can't write %s: %s", USED_POOLS, error)

    def _stamp(self) -> tuple[int, int] | None:
        if self._settings.pools is None:
            return None
        try:
            status = self._settings.pools.stat()
        except OSError:
            return (0, 0)
        return status.st_mtime_ns, status.st_size
