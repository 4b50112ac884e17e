"""Costs of machines: meters and sums in the ledger, and the measured speed of workloads."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys

#: Bookings in one command; leases must not wait long.
BOOKINGS_AT_ONCE = 500


@dataclass(frozen=True)
class Booking:
    """Amounts that a job pays for a machine, and the machine's meter before and after."""

    machine: str
    before: str | None
    after: str
    job: str | None
    amounts: Mapping[str, float]


class Costs:
    """Costs of jobs, and the meter of each machine.

    Calls raise :class:`~vcasgd.errors.StoreUnavailable` and can be repeated.
    """

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger
        self._charge = ledger.script("ledger/charge")

    def meters(self) -> dict[str, str]:
        """Return the meter of each machine, as stored by :meth:`book`."""
        meters = self._ledger.hgetall(names.METERS)
        return {machine.decode(): meter.decode() for machine, meter in meters.items()}

    def book(self, bookings: Sequence[Booking]) -> list[bool]:
        """Book each of several costs atomically, in few round trips.

        Returns whether each was booked. One whose meter is not ``before`` adds nothing.
        """
        booked: list[bool] = []
        for first in range(0, len(bookings), BOOKINGS_AT_ONCE):
            booked += self._book(bookings[first : first + BOOKINGS_AT_ONCE])
        return booked

    def _book(self, bookings: Sequence[Booking]) -> list[bool]:
        keys, arguments = [names.METERS], []
        for each in bookings:
            costs = LedgerKeys(each.job).costs if each.job else names.METERS
            if costs not in keys:
                keys.append(costs)
            pairs = [part for name, value in each.amounts.items() for part in (name, repr(value))]
            arguments += [
                each.machine, each.before or "", each.after, keys.index(costs) + 1,
                len(each.amounts), *pairs,
            ]  # fmt: skip
        return [bool(done) for done in self._charge(keys=keys, args=arguments)]

    def remove_meters(self, machines: Iterable[str]) -> None:
        """Remove the meters of machines that no longer exist."""
        if ids := list(machines):
            self._ledger.hdel(names.METERS, *ids)

    def spent(self, job: str) -> float:
        """Return the booked costs of a job in USD.

        They lag by at most :data:`~vcasgd.fleet.costs.CHARGE_SECONDS`.
        """
        return self.spent_of([job])[job]

    def spent_of(self, jobs: Collection[str]) -> dict[str, float]:
        """Return :meth:`spent` of several jobs, in one round trip."""
        sums = zip(jobs, self.of_all(jobs), strict=True)
        return {
            job: sum(usd for name, usd in amounts.items() if name.endswith("|usd"))
            for job, amounts in sums
        }

    def of(self, job: str) -> dict[str, float]:
        """Return the sums of all amounts of a job."""
        return _amounts(self._ledger.hgetall(LedgerKeys(job).costs))

    def of_all(self, jobs: Iterable[str]) -> list[dict[str, float]]:
        """Return :meth:`of` for several jobs, in one round trip."""
        with self._ledger.pipeline() as pipe:
            for job in jobs:
                pipe.hgetall(LedgerKeys(job).costs)
            return [_amounts(row) for row in pipe.execute()]


def _amounts(row: Mapping[bytes, bytes]) -> dict[str, float]:
    return {name.decode(): float(value) for name, value in row.items()}


@dataclass(frozen=True)
class Workload:
    """Measurements of jobs with the same name and task.

    ``samples``: samples of an epoch. ``batch_size``: samples in a local step. ``rates``:
    ``pool|instance type`` → samples per second of one machine.
    """

    samples: int | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    batch_size: int | None = None


class Workloads:
    """Measured workloads; they outlive their jobs."""

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger

    def get(self, name: str, task: str) -> Workload:
        """Return the measurements of jobs with this name and task; empty ones by default."""
        stored = self._ledger.hget(names.WORKLOADS, _workload(name, task))
        fields: dict[str, Any] = json.loads(stored) if stored else {}
        return Workload(**fields)

    def set(self, name: str, task: str, workload: Workload) -> None:
        """Replace the measurements of jobs with this name and task."""
        value = {**vars(workload), "rates": dict(workload.rates)}
        self._ledger.hset(names.WORKLOADS, _workload(name, task), json.dumps(value))


def _workload(name: str, task: str) -> str:
    return f"{name}|{task}"
