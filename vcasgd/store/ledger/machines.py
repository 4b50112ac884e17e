"""Machines that joined by themselves, their reports, and the workers that machines have to run.

Of machines that joined, the API writes the reports, and the controller what they have to do. Times
are those of the ledger's clock, in Unix seconds.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from hmac import compare_digest
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from vcasgd.errors import Conflict
from vcasgd.schemas.fleet import Machine, MachineState, WorkerOrder
from vcasgd.schemas.joining import JoinRequest, WorkerReport
from vcasgd.spec.hardware import Hardware
from vcasgd.steady_time import boot_time
from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.api_tokens import secret_digest

log = logging.getLogger(__name__)

#: Start of the names of all machines that joined.
PREFIX = "join-"
#: Most machines that are joined at a time; the controller reads all of them in each round.
MAX_JOINED = 1000
#: Machines that a token without a limit may join with at a time. Those that the stack orders are as
#: many as their pool allows, and one that is refused costs money.
USUAL_LIMIT = 100
#: Lease times without a report after which a machine is lost. Its leases end earlier; the rest of
#: the time, it can come back from an outage of its network.
LOST_LEASES = 3.0
#: Lease times without a sign of a gateway after which machines can't report. What follows is no
#: silence of theirs, unless it lasts for :data:`FORGET_SECONDS`.
DEAF_LEASES = 0.5
#: Lease times that a machine has to leave in.
END_LEASES = 2.0
#: Seconds after which the entries of a lost machine are deleted. Until then it can come back under
#: its name; the controller reads all entries in each round.
FORGET_SECONDS = 300.0
#: Bytes of randomness in a machine's name, and letters of its token's name: names of workers, which
#: contain it, have a limited length.
_NAME_BYTES, _NAME_LETTERS = 4, 16


class _FleetEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class JoinedMachine(_FleetEntry):
    """A machine as it joined, and the token that it joined with."""

    machine: Machine
    token: str
    #: Digest of that token. A later token with the same name is another one.
    digest: str = Field(repr=False)
    #: Digest of the machine's own secret.
    secret: str = Field(repr=False)
    #: True if a provider ordered it, and lists it itself.
    ordered: bool = False

    @property
    def name(self) -> str:
        return self.machine.id

    def sent(self, token: str, digest: str | None, secret: str) -> bool:
        """Return True if a request with this token and this secret comes from the machine."""
        own = (self.token, self.digest) == (token, digest)
        return own and compare_digest(self.secret, secret_digest(secret))


class MachineNotice(_FleetEntry):
    """Notice of eviction that a machine has received; see :class:`~vcasgd.fleet.notices.Notice`."""

    kind: Literal["terminate", "rebalance"]
    at: float | None = None


class MachineReport(_FleetEntry):
    """Last report of a machine; ``workers`` by name."""

    at: float
    leaving: bool = False
    workers: dict[str, WorkerReport] = Field(default_factory=dict)
    notice: MachineNotice | None = None


class MachineEnd(_FleetEntry):
    """Why a machine has to leave, and until when."""

    reason: str
    by: float


Kind = TypeVar("Kind", bound=_FleetEntry)


_ORDERS = TypeAdapter(list[WorkerOrder])


class JoinedMachines:
    """All machines that joined. Calls raise :class:`~vcasgd.errors.StoreUnavailable`."""

    def __init__(self, ledger: RedisClient, lease_seconds: float) -> None:
        self._ledger = ledger
        self._join = ledger.script("ledger/join")
        self._lease_seconds = lease_seconds
        #: The last sign of a gateway; when this process saw it, by :func:`boot_time`; and the time
        #: by a clock that stands while machines can't report.
        self._sign: tuple[bytes | None, float, float] | None = None
        #: Time of the last report of each machine by the ledger's clock, and by that clock.
        self._heard: dict[bytes, tuple[float, float]] = {}

    @property
    def lost_seconds(self) -> float:
        """Seconds without a report after which a machine is lost."""
        return LOST_LEASES * self._lease_seconds

    def now(self) -> float:
        """Return the ledger's time."""
        return self._ledger.now()

    def reports_arrive(self) -> None:
        """Record as a gateway that machines can report."""
        self._ledger.set(names.REPORTS_ARRIVE, self.now())

    # -- for the API -----------------------------------------------------------------------------

    def join(
        self,
        token: str,
        digest: str,
        secret: str,
        limit: int | None,
        pool: str,
        request: JoinRequest,
    ) -> JoinedMachine:
        """Add a machine of a token, which may have up to ``limit`` at a time.

        ``secret``: its own. If a provider ordered it, it may join again with the same secret, or
        after it was lost. Raises :class:`Conflict` if there are too many, or if another one has
        this name.
        """
        new = f"{PREFIX}{token[:_NAME_LETTERS]}-{secrets.token_hex(_NAME_BYTES)}"
        machine = JoinedMachine(
            machine=_machine(request.machine or new, pool, request, self.now()),
            token=token,
            digest=digest,
            secret=secret_digest(secret),
            ordered=request.machine is not None,
        )
        usual = MAX_JOINED if machine.ordered else USUAL_LIMIT
        most = usual if limit is None else limit
        answer = self._join(
            keys=[names.JOINED, names.JOINED_REPORTS],
            args=[
                *(machine.name, machine.model_dump_json(), token, most),
                *(MAX_JOINED, self.lost_seconds, machine.secret),
            ],
        )
        if answer == b"taken":
            raise Conflict(
                f"{machine.name} has joined already",
                remedy=f"if it is gone, wait for {self.lost_seconds:.0f} s",
            )
        if answer == b"limit":
            raise Conflict(
                f"the token {token} has joined as many machines as it may: {most}",
                remedy="stop one of them, or ask for a token with a higher --max-machines",
            )
        if answer == b"full":
            raise Conflict(
                f"{MAX_JOINED} machines have joined, which is the limit", remedy="try again later"
            )
        return machine

    def get(self, machine: str) -> JoinedMachine | None:
        """Return a machine; None if it never joined, has left, or was removed."""
        return _read(JoinedMachine, machine, self._ledger.hget(names.JOINED, machine))

    def owner(self, machine: str) -> str:
        """Return the token that a machine joined with; its own name if it is gone."""
        known = self.get(machine)
        return machine if known is None else known.token

    def report(
        self, machine: str, workers: Mapping[str, WorkerReport], *, leaving: bool
    ) -> tuple[list[WorkerOrder], MachineEnd | None]:
        """Store a report; return what the machine has to run, and why it has to leave, if so."""
        report = MachineReport(at=self.now(), leaving=leaving, workers=dict(workers))
        with self._ledger.pipeline() as pipe:
            pipe.hset(names.JOINED_REPORTS, machine, report.model_dump_json())
            pipe.hget(names.WORKER_ORDERS, machine)
            pipe.hget(names.JOINED_ENDS, machine)
            _, orders, end = pipe.execute()
        return _read_orders(machine, orders), _read(MachineEnd, machine, end)

    def orders_of(self, machine: str) -> list[WorkerOrder]:
        """Return the workers that a machine has to run."""
        return _read_orders(machine, self._ledger.hget(names.WORKER_ORDERS, machine))

    def remove(self, *machines: str) -> None:
        """Remove machines that have left."""
        if not machines:
            return
        with self._ledger.pipeline(transaction=True) as pipe:
            for key in (
                names.JOINED,
                names.JOINED_REPORTS,
                names.WORKER_ORDERS,
                names.JOINED_ENDS,
            ):
                pipe.hdel(key, *machines)
            pipe.execute()

    # -- for the controller ----------------------------------------------------------------------

    def present(self) -> list[tuple[JoinedMachine, MachineReport, MachineEnd | None]]:
        """Return the machines that are not lost, and forget those that have been for long."""
        # Otherwise, one that joins in between would have a report only.
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.hgetall(names.JOINED)
            pipe.hgetall(names.JOINED_REPORTS)
            pipe.hgetall(names.JOINED_ENDS)
            pipe.get(names.REPORTS_ARRIVE)
            pipe.time()
            machines, reports, ends, sign, (seconds, _) = pipe.execute()
        present, gone, now = [], [], self._hearing_time(sign)
        last = seconds if sign is None else float(sign)
        heard: dict[bytes, tuple[float, float]] = {}
        for name, row in machines.items():
            machine = _read(JoinedMachine, name.decode(), row)
            report = _read(MachineReport, name.decode(), reports.get(name))
            end = _read(MachineEnd, name.decode(), ends.get(name))
            if report is not None:
                heard[name] = self._last_heard(name, report, last, now)
            silence = now - heard[name][1] if name in heard else float("inf")
            if machine is None or silence > FORGET_SECONDS or (end and seconds > end.by):
                gone.append(name.decode())
            elif report is not None and silence < self.lost_seconds:
                present.append((machine, report, end))
        gone += [name.decode() for name in reports.keys() - machines.keys()]
        # At once, because several threads look.
        self._heard = heard
        self.remove(*gone)
        return present

    def _hearing_time(self, sign: bytes | None) -> float:
        """Return the time by the clock that stands while machines can't report."""
        now = boot_time()
        known, seen_at, began = self._sign or (sign, now, now)
        passed = now - seen_at
        deaf = max(0.0, min(passed, FORGET_SECONDS) - DEAF_LEASES * self._lease_seconds)
        time = began + passed - (0.0 if known is None else deaf)
        if self._sign is None or sign is None or sign != known:
            self._sign = (sign, now, time)
            if known is not None and passed > self._lease_seconds:
                log.warning("no machine could report for %.0f s; none is lost for that", passed)
        return time

    def _last_heard(
        self, machine: bytes, report: MachineReport, seconds: float, now: float
    ) -> tuple[float, float]:
        """Return the time of a report by the ledger's clock, whose steps don't count, and by
        the other one. ``seconds`` and ``now`` are the present ones."""
        known = self._heard.get(machine)
        if known is None:
            return report.at, now - max(0.0, seconds - report.at)
        return known if known[0] == report.at else (report.at, now)

    def end(self, machine: str, reason: str, seconds: float | None = None) -> None:
        """Tell a machine to leave, within ``seconds`` or a usual time."""
        limit = END_LEASES * self._lease_seconds if seconds is None else seconds
        end = MachineEnd(reason=reason, by=self.now() + limit)
        self._ledger.hset(names.JOINED_ENDS, machine, end.model_dump_json())


class WorkerOrders:
    """The workers that each machine has to run. Only the leading controller writes them.

    Methods raise :class:`~vcasgd.errors.StoreUnavailable`.
    """

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger

    def all(self) -> dict[str, list[WorkerOrder]]:
        rows = self._ledger.hgetall(names.WORKER_ORDERS)
        return {name.decode(): _read_orders(name.decode(), row) for name, row in rows.items()}

    def set(self, orders: Mapping[str, Iterable[WorkerOrder]]) -> None:
        """Replace the orders of some machines."""
        if orders:
            rows = {machine: to_json(own) for machine, own in orders.items()}
            self._ledger.hset(names.WORKER_ORDERS, mapping=rows)

    def forget(self, *machines: str) -> None:
        """Delete the orders of machines that are lost."""
        if machines:
            self._ledger.hdel(names.WORKER_ORDERS, *machines)


def _machine(name: str, pool: str, request: JoinRequest, now: float) -> Machine:
    # Rounded, so that a pool has few kinds.
    memory, of_gpu = round(request.memory_mb / 1e3), round((request.gpu_memory_mb or 0) / 1e3)
    return Machine(
        id=name,
        pool=pool,
        state=MachineState.RUNNING,
        launched_at=now,
        notice_at=None,
        host=request.host,
        price_per_hour=0.0,
        spot=True,
        zone="anywhere",
        machine_type=_type_of(request),
        hardware=Hardware(request.cpus, memory or None, request.gpus, request.gpu, of_gpu or None),
    )


def _type_of(request: JoinRequest) -> str:
    """Return a type by which speeds are compared: machines of one type are about equally fast."""
    if request.gpus:
        name = "-".join(request.gpu.lower().split()) or "gpu"
        return f"{request.gpus}x{name}"
    return f"{request.cpus:g}-cpu"


def _read(kind: type[Kind], name: str, row: bytes | None) -> Kind | None:
    if row is None:
        return None
    try:
        return kind.model_validate_json(row)
    except ValidationError:
        log.warning("the %s of %s can't be read", kind.__name__, name)
        return None


def to_json(orders: Iterable[WorkerOrder]) -> str:
    return _ORDERS.dump_json([*orders]).decode()


def _read_orders(machine: str, row: bytes | None) -> list[WorkerOrder]:
    """Return a machine's orders; none if they can't be read."""
    try:
        return _ORDERS.validate_json(row or b"[]")
    except ValidationError:
        log.warning("the orders of %s can't be read", machine)
        return []
