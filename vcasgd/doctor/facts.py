"""Facts about an installation. None means unknown or not applicable, and is never a finding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KnownError:
    """An error that a part of vcasgd raised, with its remedy."""

    message: str
    remedy: str | None = None


@dataclass(frozen=True)
class PriceFact:
    """A type of a pool and its list price: the age of its table in days, or no price."""

    pool: str
    machine_type: str
    age_days: float | None = None
    missing: KnownError | None = None


@dataclass(frozen=True)
class AccountFact:
    """Permission that is missing to buy machines of a pool, or why that is unknown."""

    pool: str
    problem: KnownError | None = None
    denied: str | None = None


@dataclass(frozen=True)
class PoolFact:
    """A pool as the controller published it: why it backs off, and whether on a quota."""

    name: str
    reason: str | None = None
    quota: int | None = None


@dataclass(frozen=True)
class ApiFact:
    """The answer of the API. ``clock_ahead``: seconds that its clock is ahead of this one."""

    url: str
    problem: KnownError | None = None
    version: str | None = None
    controller: bool | None = None
    clock_ahead: float | None = None
    pools: tuple[PoolFact, ...] = ()


@dataclass(frozen=True)
class Facts:
    """Facts about this machine, its settings, and the API that they name. Sizes are in bytes."""

    version: str
    python: tuple[int, int]
    #: Installed version by requirement that it doesn't meet; None if it is not installed.
    unmet: Mapping[str, str | None] = field(default_factory=dict)
    #: Libraries that only a stack needs, and that are not installed.
    missing: tuple[str, ...] = ()
    dashboard: bool | None = None
    settings: KnownError | None = None
    home: str | None = None
    home_problem: str | None = None
    disk_free: int | None = None
    memory: int | None = None
    shared_memory: int | None = None
    open_files: int | None = None
    port: int | None = None
    port_taken: bool | None = None
    #: Files with secrets that other users of this machine can read.
    exposed: tuple[str, ...] = ()
    redis_problem: str | None = None
    pools: KnownError | None = None
    prices: tuple[PriceFact, ...] = ()
    accounts: tuple[AccountFact, ...] = ()
    api: ApiFact | None = None
