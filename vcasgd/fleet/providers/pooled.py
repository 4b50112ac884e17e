"""Base of providers: their pools, the request of a launch, and errors from clouds' codes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    InvalidRequest,
    QuotaExceeded,
    Throttled,
)
from vcasgd.fleet.providers.base import Boot, Offer


class Choices(Protocol):
    """Offers of a pool."""

    @property
    def name(self) -> str: ...
    @property
    def zones(self) -> tuple[str, ...]: ...
    @property
    def machine_types(self) -> tuple[str, ...]: ...
    @property
    def spot(self) -> bool: ...


Spec = TypeVar("Spec", bound=Choices)


@dataclass(frozen=True)
class LaunchOrder(Generic[Spec]):
    """Request for up to ``count`` machines in any of these zones, of any of these types."""

    spec: Spec
    count: int
    boot: Boot
    token: str
    zones: tuple[str, ...]
    machine_types: tuple[str, ...]
    spot: bool


class PooledProvider(Generic[Spec]):
    """Base of implementations of :class:`~vcasgd.fleet.providers.base.Provider`.

    They implement ``_offer``, ``_launch``, ``machines``, ``terminate``, and ``evict``, which may
    raise what the contract names.
    """

    def __init__(self, cluster: str, pools: Iterable[Spec]) -> None:
        self._cluster = cluster
        self._pools = {pool.name: pool for pool in pools}
        #: Reasons of failed boots, as last listed.
        self._boot_errors: dict[str, str | None] = {}

    def offers(self, pool: str) -> list[Offer]:
        spec = self._pool(pool)
        return [self._offer(spec, zone, kind) for zone in spec.zones for kind in spec.machine_types]

    def launch(
        self,
        pool: str,
        count: int,
        boot: Boot,
        token: str,
        *,
        zones: Sequence[str] | None = None,
        machine_types: Sequence[str] | None = None,
        spot: bool | None = None,
    ) -> list[str]:
        spec = self._pool(pool)
        return self._launch(
            LaunchOrder(
                spec,
                count,
                boot,
                token,
                _narrowed(spec.zones, zones, pool, "zone"),
                _narrowed(spec.machine_types, machine_types, pool, "machine type"),
                spec.spot if spot is None else spot,
            )
        )

    def capacity(self, pool: str) -> int | None:  # noqa: ARG002
        return None

    def boot_error(self, machine_id: str) -> str | None:
        return self._boot_errors.get(machine_id)

    def terminate(self, *machine_ids: str) -> None:
        raise NotImplementedError

    def kill(self, machine_id: str) -> None:
        """Terminate the machine: clouds shut its system down first."""
        self.terminate(machine_id)

    def close(self) -> None:
        """Do nothing: there are no connections."""

    def _offer(self, spec: Spec, zone: str, kind: str) -> Offer:
        raise NotImplementedError

    def _launch(self, order: LaunchOrder[Spec]) -> list[str]:
        raise NotImplementedError

    def _pool(self, name: str) -> Spec:
        if name not in self._pools:
            raise InvalidRequest(
                f"there is no pool {name!r}",
                remedy=f"known pools: {', '.join(self._pools)}",
                pool=name,
            )
        return self._pools[name]


def _narrowed(
    available: Sequence[str], requested: Sequence[str] | None, pool: str, what: str
) -> tuple[str, ...]:
    """Return the ``requested`` zones or types of a pool, or all of them for None.

    Raises :class:`~vcasgd.errors.InvalidRequest` if the pool has none of them.
    """
    chosen = tuple(one for one in available if requested is None or one in requested)
    if not chosen:
        raise InvalidRequest(
            f"{pool}: has no {what} {', '.join(requested or ())}",
            remedy=f"known: {', '.join(available)}",
            pool=pool,
        )
    return chosen


#: Patterns of codes or messages, without regard to case; the first that matches counts.
Patterns = Mapping[type[FleetError], str]

_REMEDIES: Mapping[type[FleetError], str] = {
    QuotaExceeded: "request a higher quota from the cloud, or set the pool's max_machines",
    CloudDenied: "docs/security.md lists the permissions that the controller needs",
    InvalidRequest: "check the pool's template, zones, and machine types",
}


def kind_of(text: str, patterns: Patterns, status: int | None = None) -> type[FleetError]:
    """Return the error class for a code or message. The HTTP status decides for an unknown one.

    Without a status, the request may have been completed, so the cloud counts as unavailable.
    """
    for kind, pattern in patterns.items():
        if re.search(pattern, text, re.IGNORECASE):
            return kind
    if status is None or status >= 499 or status == 408:
        return CloudUnavailable
    if status in (401, 403):
        return CloudDenied
    return Throttled if status == 429 else InvalidRequest


def refusal_of(
    patterns: Patterns,
    code: str,
    message: str,
    *,
    status: int = 400,
    pool: str | None = None,
    zone: str | None = None,
) -> FleetError:
    """Convert a refusal of a cloud. The message contains the code."""
    kind, text = kind_of(code, patterns, status), f"{code}: {message}"
    return fleet_error(kind, text, pool=pool, zone=zone, code=code, status=status)


def fleet_error(
    kind: type[FleetError],
    message: str,
    *,
    remedies: Mapping[type[FleetError], str] = _REMEDIES,
    pool: str | None = None,
    zone: str | None = None,
    **details: Any,
) -> FleetError:
    """Return an error whose message begins with the pool and the zone, if they are known."""
    where = "".join(f"{part}: " for part in (pool, zone) if part)
    known = {"pool": pool, "zone": zone, **details}
    known = {name: value for name, value in known.items() if value is not None}
    return kind(f"{where}{message}", remedy=remedies.get(kind), **known)
