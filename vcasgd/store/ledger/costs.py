"""Costs of machines: meters, clocks and sums in the ledger; measured speeds of workloads."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from vcasgd.schemas.costs import Workload
from vcasgd.spec.job import MEMBER
from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys

#: Bookings in one command; leases must not wait long.
BOOKINGS_AT_ONCE = 500
#: Field of a job's costs with its clock: until when they include its machines (Unix seconds).
CLOCK = "clock"
#: Measured workloads that are kept; otherwise, each new name of a job would stay in the ledger.
MAX_WORKLOADS = 10_000


@dataclass(frozen=True)
class Booking:
    """Amounts that a job pays for a machine, and the machine's meter before and after.

    ``clock``: that of the job, in Unix seconds; None if the job has none yet.
    """

    machine: str
    before: str | None
    after: str
    job: str | None
    amounts: Mapping[str, float]
    clock: float | None = None

    @property
    def words(self) -> _Words:
        keys = LedgerKeys(self.job) if self.job else None
        costs, record = (keys.costs, keys.record) if keys else (names.METERS, "")
        meter = names.METERS, self.machine, self.before or "", self.after
        return *meter, costs, _clock(self.clock), record


@dataclass(frozen=True)
class Advance:
    """Amounts that a job pays for all of its machines, and its clock before and after."""

    job: str
    before: float | None
    after: float
    amounts: Mapping[str, float]

    @property
    def words(self) -> _Words:
        keys, before = LedgerKeys(self.job), _clock(self.before)
        return keys.costs, CLOCK, before, _clock(self.after), keys.costs, before, keys.record


#: Key and field of a meter, its value before and after; key and clock of the costs; key of the
#: job's record.
_Words = tuple[str, str, str, str, str, str, str]


class Costs:
    """Costs and clocks of jobs, and the meter of each machine.

    Calls raise :class:`~vcasgd.errors.StoreUnavailable` and can be repeated.
    """

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger
        self._charge = ledger.script("ledger/charge")

    def meters(self) -> dict[str, str]:
        """Return the meter of each machine, as stored by :meth:`book`."""
        meters = self._ledger.hgetall(names.METERS)
        return {machine.decode(): meter.decode() for machine, meter in meters.items()}

    def clocks(self, jobs: Collection[str]) -> dict[str, float]:
        """Return the clocks of jobs that have one, in one round trip."""
        clocks = self._ledger.of_each("HGET", (LedgerKeys(job).costs for job in jobs), CLOCK)
        return {job: float(clock) for job, clock in zip(jobs, clocks, strict=True) if clock}

    def book(self, charges: Sequence[Booking | Advance], now: float | None = None) -> list[bool]:
        """Book each of several costs atomically, in few round trips, in the month of ``now``.

        Returns whether each was booked. One whose meter or clock is not ``before``, or whose job's
        clock is not ``clock``, adds nothing.
        """
        booked: list[bool] = []
        for first in range(0, len(charges), BOOKINGS_AT_ONCE):
            numbers: dict[str, int] = {names.SPEND: 1}
            arguments: list[str | int] = [month_of(now or time.time())]
            for charge in charges[first : first + BOOKINGS_AT_ONCE]:
                meters, field_name, before, after, costs, clock, record = charge.words
                for key in (meters, costs, *([record] if record else [])):
                    numbers.setdefault(key, len(numbers) + 1)
                arguments += [numbers[meters], field_name, before, after, numbers[costs], clock]
                arguments += [numbers.get(record, 0), len(charge.amounts)]
                for name, value in charge.amounts.items():
                    arguments += [name, repr(value)]
            booked += [bool(done) for done in self._charge(keys=list(numbers), args=arguments)]
        return booked

    def remove_meters(self, machines: Iterable[str]) -> None:
        """Remove the meters of machines that no longer exist."""
        if ids := list(machines):
            self._ledger.hdel(names.METERS, *ids)

    def spent(self, job: str) -> float:
        """Return the booked costs of a job in USD.

        They lag by at most :data:`~vcasgd.fleet.costs.CHARGE_SECONDS`.
        """
        return sum(usd for name, usd in self.of(job).items() if name.endswith("|usd"))

    def spent_in(self, month: str) -> dict[str, float]:
        """Return the USD that were booked in a month for the jobs of each user.

        Those of jobs without a user, and of deleted jobs, have an empty name.
        """
        rows = self._ledger.hgetall(names.SPEND)
        parts = ((name.decode().partition("|"), value) for name, value in rows.items())
        return {user: float(value) for (at, _, user), value in parts if at == month}

    def of(self, job: str) -> dict[str, float]:
        """Return the sums of all amounts of a job."""
        return _amounts(self._ledger.hgetall(LedgerKeys(job).costs))

    def of_all(self, jobs: Iterable[str]) -> list[dict[str, float]]:
        """Return :meth:`of` for several jobs, in one round trip."""
        rows = self._ledger.of_each("HGETALL", (LedgerKeys(job).costs for job in jobs))
        return [_amounts(row) for row in rows]


def month_of(now: float) -> str:
    """Return the month of a Unix time, in UTC, such as ``2026-11``."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m")


def _amounts(row: Mapping[bytes, bytes]) -> dict[str, float]:
    return {name.decode(): float(value) for name, value in row.items() if name != CLOCK.encode()}


def _clock(clock: float | None) -> str:
    return "" if clock is None else repr(clock)


class Workloads:
    """Measured workloads; they outlive their jobs."""

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger

    def get(self, name: str, task: str) -> Workload:
        """Return the measurements of jobs with this name and task; empty ones by default."""
        stored = self._ledger.hget(names.WORKLOADS, _workload(name, task))
        fields: dict[str, Any] = json.loads(stored) if stored else {}
        return Workload(**fields)

    def set(self, workloads: Mapping[tuple[str, str], Workload]) -> None:
        """Replace the measurements of jobs, given by name and task."""
        rows = {
            _workload(name, task): json.dumps({**vars(each), "rates": dict(each.rates)})
            for (name, task), each in workloads.items()
        }
        self._ledger.hset(names.WORKLOADS, mapping=rows)

    def trim(self) -> None:
        """Delete some measurements if there are too many; those of active jobs return."""
        if (excess := self._ledger.hlen(names.WORKLOADS) - MAX_WORKLOADS) > 0:
            self._ledger.hdel(names.WORKLOADS, *self._ledger.hrandfield(names.WORKLOADS, excess))


def _workload(name: str, task: str) -> str:
    # The jobs of a sweep are measured as one kind.
    return f"{name.partition(MEMBER)[0]}|{task}"
