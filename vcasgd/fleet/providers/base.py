"""What every provider of machines promises, whatever cloud is behind it.

The truth about a fleet lies with the cloud, never in the memory of a process: a provider
constructed anew in another process sees the same instances, by their cluster tag. Every
call returns soon and may be repeated; what takes long shows in :meth:`Provider.instances`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from vcasgd.errors import InvalidRequest

#: stands for the instance's id in a :class:`Boot`; nobody knows the id before the launch
INSTANCE_ID = "{instance_id}"
#: of what a machine says of its boot; the scripts of the images say no more
BOOT_ERROR_LENGTH = 250
#: stands for the machine's Python, which has vcasgd installed
PYTHON = "{python}"


class InstanceState(StrEnum):
    """``LEAVING`` has a notice of eviction and still runs; ``GONE`` never comes back."""

    BOOTING = "booting"
    RUNNING = "running"
    LEAVING = "leaving"
    GONE = "gone"


@dataclass(frozen=True)
class Instance:
    """A machine as its cloud sees it. Times are Unix seconds, prices USD per hour."""

    id: str
    pool: str
    state: InstanceState
    launched_at: float
    notice_at: float | None
    """When it will be taken; ``None`` without a notice."""
    host: str
    price_per_hour: float
    """What it costs now; the market changes the price of spot machines while they run."""
    spot: bool
    zone: str = ""
    instance_type: str = ""
    on_demand_price_per_hour: float = 0.0
    """What a machine of this type costs there without the risk."""
    advised_at: float | None = None
    """Since when the cloud has advised to leave it; it may run on for long, or not."""


@dataclass(frozen=True)
class Offer:
    """What a pool would sell now: one type of machine in one zone. Prices are USD per hour."""

    pool: str
    zone: str
    instance_type: str
    spot: bool
    price_per_hour: float
    on_demand_price_per_hour: float
    cpus: float
    gpus: int
    as_of: float
    """When the price was true (Unix seconds)."""
    source: str
    """Where the price is from, for people."""


@dataclass(frozen=True)
class Boot:
    """What a machine runs once it is up; its end is the end of the machine.

    The words ``{instance_id}`` and ``{python}`` in an argument or a value are replaced by the
    instance's id and by the machine's Python. Values of ``env`` may be passwords, so they are
    not shown.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict, repr=False)

    def on(self, instance_id: str) -> Boot:
        """The same on that machine, which is the one that asks: with all placeholders filled in."""

        def fill(text: str) -> str:
            return text.replace(INSTANCE_ID, instance_id).replace(PYTHON, sys.executable)

        argv = tuple(fill(argument) for argument in self.argv)
        return Boot(argv, {name: fill(value) for name, value in self.env.items()})

    def __repr__(self) -> str:
        return f"Boot(argv={self.argv!r}, env={{{', '.join(f'{name}=…' for name in self.env)}}})"


class Provider(Protocol):
    """A place that machines come from. All methods may be called from several processes.

    Any method raises a :class:`~vcasgd.errors.FleetError` when the cloud can't be reached or
    refuses. Where ``retryable`` is true the caller tries again later, with the same arguments;
    else somebody has to change something first. Which error means what:
    :class:`~vcasgd.errors.CloudUnavailable`, :class:`~vcasgd.errors.Throttled`,
    :class:`~vcasgd.errors.CloudDenied`, :class:`~vcasgd.errors.InvalidRequest`.
    """

    @property
    def name(self) -> str:
        """``local``, ``aws`` or ``gcp``."""
        ...

    def offers(self, pool: str) -> list[Offer]:
        """What each type costs in each zone of the pool; empty if nothing is for sale.

        Takes up to some seconds; prices may be some minutes old, which ``as_of`` tells. Raises
        :class:`~vcasgd.errors.SpecError` where the price of a type is not known.
        """
        ...

    def launch(
        self,
        pool: str,
        count: int,
        boot: Boot,
        token: str,
        *,
        zones: Sequence[str] | None = None,
        instance_types: Sequence[str] | None = None,
        spot: bool | None = None,
    ) -> list[str]:
        """Asks for up to ``count`` machines; the ids of those that the pool gives, at least one.

        ``zones`` and ``instance_types`` narrow the pool's down, ``spot`` replaces the pool's.
        Idempotent by ``token`` (at most 64 characters): the same token again, with whatever
        else, starts nothing new and returns the ids of the first time, even if some of these
        machines are gone by now, as long as the cloud still knows them (an hour). Returns within
        half a minute: the machines are ``BOOTING``, and may not yet be in :meth:`instances`, so
        the caller remembers the ids until they are.

        Raises :class:`~vcasgd.errors.NoCapacity` when the pool gives none, and
        :class:`~vcasgd.errors.QuotaExceeded` when the account may have no more; then nothing was
        launched. After :class:`~vcasgd.errors.CloudUnavailable` something may have been: who
        repeats the token learns what.
        """
        ...

    def capacity(self, pool: str) -> int | None:
        """How many machines the pool has at most; ``None`` where only a launch can tell."""
        ...

    def instances(self) -> list[Instance]:
        """All machines with the cluster's tag in this provider's reach that are not ``GONE``;
        also those whose pool is not among its pools any more.

        A machine launched some seconds ago may not be listed yet; one that has died may be
        listed for some seconds more.
        """
        ...

    def boot_error(self, instance_id: str) -> str | None:
        """What a machine said of its boot that failed, in one line; ``None`` if it said nothing.

        These are the machine's own words, where anybody who may speak for it can put any. Takes
        up to some seconds, and lags as much.
        """
        ...

    def terminate(self, instance_id: str) -> None:
        """Ends a machine that is no longer wanted. Idempotent; silent if there is none.

        Returns soon; the machine may be listed a while longer.
        """
        ...

    def evict(self, instance_id: str, notice_seconds: float | None = None) -> None:
        """Gives a real notice, as the cloud would, and takes the machine when it has passed.

        ``None`` is the notice that is usual there. The first notice stands; silent if there
        is no such machine. Raises :class:`~vcasgd.errors.FleetError` where the cloud offers
        no way to do it.
        """
        ...

    def kill(self, instance_id: str) -> None:
        """Takes a machine with no notice at all. Idempotent; silent if there is none."""
        ...

    def close(self) -> None:
        """Releases connections. The machines stay."""
        ...


def one_line(text: str) -> str | None:
    """What a machine said, fit to be shown; ``None`` if that is nothing."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text[:BOOT_ERROR_LENGTH])
    return " ".join(shown.split()) or None


def narrowed(
    known: Sequence[str], wanted: Sequence[str] | None, pool: str, what: str
) -> tuple[str, ...]:
    """The ``wanted`` zones or types of a pool, all of them for ``None``.

    Raises :class:`~vcasgd.errors.InvalidRequest` where it has none of them.
    """
    chosen = tuple(known) if wanted is None else tuple(one for one in wanted if one in known)
    if not chosen:
        raise InvalidRequest(
            f"{pool}: has no {what} {', '.join(wanted or ())}",
            remedy=f"known: {', '.join(known)}",
            pool=pool,
        )
    return chosen
