"""Contract and base of all providers of machines.

The cloud has the authoritative state of a fleet, not a process: a new provider in another process
finds the same machines by their cluster tag. Each call returns soon and may be repeated. The
results of slow operations appear in :meth:`Provider.machines`.
"""

from __future__ import annotations

import re
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    InvalidRequest,
    QuotaExceeded,
    Throttled,
)
from vcasgd.fleet.pools import PoolSpec
from vcasgd.fleet.prices import ListPrice
from vcasgd.printable import printable
from vcasgd.schemas.costs import Offer
from vcasgd.schemas.fleet import Machine

#: Placeholder for the machine's id in a :class:`Boot`; the id is unknown before the launch.
MACHINE_ID = "{machine_id}"
#: Maximum number of characters of a boot error; the image's scripts write no more.
BOOT_ERROR_LENGTH = 250
#: Calls to one provider that may be under way at the same time.
CONNECTIONS = 20
#: Placeholder for the machine's Python, which has vcasgd installed.
PYTHON = "{python}"


@dataclass(frozen=True)
class Boot:
    """Command that a machine runs after its boot. The machine ends with it.

    ``{machine_id}`` and ``{python}`` in arguments and values stand for the machine's id and the
    machine's Python. Values of ``env`` may be passwords, so they aren't shown. A provider whose
    machines share a computer may import ``imports`` once for all of them.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict, repr=False)
    imports: tuple[str, ...] = ()

    def on(self, machine_id: str) -> Boot:
        """Return the command with all placeholders filled in. Call it on the machine itself."""

        def fill(text: str) -> str:
            return text.replace(MACHINE_ID, machine_id).replace(PYTHON, sys.executable)

        argv = tuple(fill(argument) for argument in self.argv)
        return Boot(argv, {name: fill(value) for name, value in self.env.items()})

    def __repr__(self) -> str:
        return f"Boot(argv={self.argv!r}, env={{{', '.join(f'{name}=…' for name in self.env)}}})"


@dataclass(frozen=True)
class AccountQuota:
    """A quota that limits a pool's vCPUs.

    ``least``: vCPUs of the pool's smallest machine. ``used`` is 0 if the cloud doesn't report it.
    """

    name: str
    limit: float
    least: float
    used: float = 0.0
    remedy: str = ""

    @property
    def suffices(self) -> bool:
        """True if there is room for one machine."""
        return self.limit - self.used >= self.least


@dataclass(frozen=True)
class AccountAnswer:
    """Answer of a cloud. ``denied`` says which permission is missing, if one is."""

    denied: str | None = None
    quotas: tuple[AccountQuota, ...] = ()


def one_line(text: str) -> str | None:
    """Return a machine's text as one printable line, or None if it is empty."""
    return " ".join(printable(text[:BOOT_ERROR_LENGTH]).split()) or None


Client = TypeVar("Client")


class Connection(Generic[Client]):
    """A client of a cloud, which is made at its first use, on the thread of that call.

    Credentials from a machine's metadata take long while that is slow. After an error, the next use
    tries again.
    """

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make, self._lock = make, threading.Lock()
        self.made: Client | None = None

    def __call__(self) -> Client:
        """Return the client. Raises the errors of ``make``."""
        with self._lock:
            if self.made is None:
                self.made = self._make()
            return self.made


Spec = TypeVar("Spec", bound=PoolSpec)


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


class Provider(ABC, Generic[Spec]):
    """Source of machines. Several processes and threads may call all public methods.

    Each of them raises a :class:`~vcasgd.errors.FleetError` if the cloud can't be reached or
    refuses. If its ``retryable`` is true, the caller retries later with the same arguments;
    otherwise a person must change something first. For the meaning of each error, see
    :class:`~vcasgd.errors.CloudUnavailable`, :class:`~vcasgd.errors.Throttled`,
    :class:`~vcasgd.errors.CloudDenied`, :class:`~vcasgd.errors.InvalidRequest`.

    Subclasses implement ``_offer`` and ``_launch``, or what calls them, beside abstract methods.
    """

    #: ``local``, ``aws``, ``gcp``, ``join``, ``slurm``, ``kubernetes``, or ``exec``.
    name: ClassVar[str]
    #: Number of machines that one :meth:`terminate` should end at most.
    max_terminated: ClassVar[int]

    def __init__(self, cluster: str, pools: Iterable[Spec]) -> None:
        self._cluster = cluster
        self._pools = {pool.name: pool for pool in pools}
        #: Reasons of failed boots, as last listed.
        self._boot_errors: dict[str, str | None] = {}

    def offers(self, pool: str) -> list[Offer]:
        """Return the offers for each type and zone of the pool; empty if nothing is for sale.

        Takes up to some seconds. Prices may be some minutes old; see ``as_of``. Raises
        :class:`~vcasgd.errors.SpecError` if the price of a type is unknown.
        """
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
        """Launch up to ``count`` machines, and return the ids of those granted, at least one.

        ``zones`` and ``machine_types`` restrict the pool's; ``spot`` overrides the pool's. A
        launch is idempotent by ``token`` (at most 64 characters): the same token with any arguments
        starts nothing new and returns the ids of the first launch, even of machines that are gone,
        while the cloud still lists them (an hour). Returns within half a minute. The machines are
        then ``BOOTING`` and may not be in :meth:`machines` yet, so the caller keeps the ids until
        they are.

        Raises :class:`~vcasgd.errors.NoCapacity` if the pool has no machine, and
        :class:`~vcasgd.errors.QuotaExceeded` if the account may have no more; then nothing was
        launched. After :class:`~vcasgd.errors.CloudUnavailable`, machines may have been launched;
        repeat the token to find out.
        """
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
        """Return how many machines the provider has; None if only a launch can determine it."""
        return None

    @abstractmethod
    def machines(self) -> list[Machine]:
        """Return all machines with the cluster's tag that are not ``GONE``.

        This includes machines whose pool was removed. New machines may be listed some seconds late,
        and dead ones for some seconds more.
        """

    def boot_error(self, machine_id: str) -> str | None:
        """Return the boot error that a machine reported, in one line; None without one.

        The text is untrusted: any process with the machine's rights can write it. Takes up to some
        seconds, and may be as old.
        """
        return self._boot_errors.get(machine_id)

    @abstractmethod
    def terminate(self, *machine_ids: str) -> None:
        """End machines that are no longer needed. Idempotent; ignores those that don't exist.

        Returns soon; the machines may be listed for a while longer. One that can't be ended keeps
        no other one alive: its error is raised at the end.
        """

    @abstractmethod
    def evict(self, machine_id: str, notice_seconds: float | None = None) -> None:
        """Give a real notice, as the cloud would, and take the machine at its end.

        None means the cloud's usual notice time. Does nothing if the machine has a notice or
        doesn't exist. Raises :class:`~vcasgd.errors.FleetError` if the cloud doesn't support it.
        """

    def kill(self, machine_id: str) -> None:
        """Take a machine without notice. Idempotent; does nothing if there is none.

        By default like :meth:`terminate`: clouds shut its system down first.
        """
        self.terminate(machine_id)

    def close(self) -> None:
        """Release connections, if there are any. The machines stay."""

    def _offer(self, spec: Spec, zone: str, kind: str) -> Offer:
        """Return one offer; a provider that overrides :meth:`offers` needs none."""
        raise NotImplementedError

    def _launch(self, order: LaunchOrder[Spec]) -> list[str]:
        """Launch machines; a provider that overrides :meth:`launch` needs no such method."""
        raise NotImplementedError

    def _pool(self, name: str) -> Spec:
        if name not in self._pools:
            raise InvalidRequest(
                f"there is no pool {name!r}",
                remedy=f"known pools: {', '.join(self._pools)}",
            )
        return self._pools[name]


def offer_of(spec: PoolSpec, zone: str, kind: str, price: float, listed: ListPrice) -> Offer:
    """Return a pool's offer of a type at a price in USD per hour.

    The hardware that the pool names replaces what is listed.
    """
    has = listed.hardware
    return Offer(
        pool=spec.name,
        zone=zone,
        machine_type=kind,
        spot=spec.spot,
        price_per_hour=price,
        on_demand_price_per_hour=listed.on_demand,
        cpus=spec.cpus or has.cpus,
        gpus=has.gpus if spec.gpus is None else spec.gpus,
        as_of=listed.as_of,
        source=listed.source,
        memory_gb=spec.memory or has.memory_gb,
        gpu=spec.gpu or has.gpu,
        gpu_memory_gb=spec.gpu_memory or has.gpu_memory_gb,
    )


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
        )
    return chosen


# -- errors from clouds' codes ---------------------------------------------------------------------

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
    known = {name: value for name, value in details.items() if value is not None}
    return kind(f"{where}{message}", remedy=remedies.get(kind), **known)
