"""What machines have cost: meters and sums in the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys


class Costs:
    """Every call may raise :class:`~vcasgd.errors.StoreUnavailable` and may be repeated."""

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger
        self._charge = ledger.script("ledger/charge")

    def meters(self) -> dict[str, str]:
        """By machine, as :meth:`book` was told."""
        found = self._ledger.hgetall(names.METERS)
        return {machine.decode(): meter.decode() for machine, meter in found.items()}

    def book(
        self,
        machine: str,
        before: str | None,
        after: str,
        job: str | None,
        amounts: Mapping[str, float],
    ) -> bool:
        """Adds the amounts to what the job has cost. False where the machine's meter is another
        one than ``before``; then nothing was added."""
        costs = LedgerKeys(job).costs if job else names.METERS
        pairs = [part for name, value in amounts.items() for part in (name, repr(value))]
        return bool(
            self._charge(keys=[names.METERS, costs], args=[machine, before or "", after, *pairs])
        )

    def forget(self, machines: Iterable[str]) -> None:
        """Meters that nobody will ask for again."""
        if gone := list(machines):
            self._ledger.hdel(names.METERS, *gone)

    def spent(self, job: str) -> float:
        """USD that are booked, at most :data:`~vcasgd.fleet.costs.CHARGE_SECONDS` ago."""
        return sum(value for name, value in self.of(job).items() if name.endswith("|usd"))

    def of(self, job: str) -> dict[str, float]:
        """The sums of all amounts of a job."""
        found = self._ledger.hgetall(LedgerKeys(job).costs)
        return {name.decode(): float(value) for name, value in found.items()}

    def of_all(self, jobs: Iterable[str]) -> list[dict[str, float]]:
        """As :meth:`of`, in one round trip."""
        with self._ledger.pipeline() as pipe:
            for job in jobs:
                pipe.hgetall(LedgerKeys(job).costs)
            found = pipe.execute()
        return [{name.decode(): float(value) for name, value in each.items()} for each in found]


@dataclass(frozen=True)
class Workload:
    """What is known of jobs of the same name and task: samples of an epoch, and how many a
    machine trained a second, by ``pool|instance type``."""

    samples: int | None = None
    rates: Mapping[str, float] = field(default_factory=dict)


class Workloads:
    """What jobs have shown; it outlives them."""

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger

    def get(self, name: str, task: str) -> Workload:
        found = self._ledger.hget(names.WORKLOADS, _workload(name, task))
        fields: dict[str, Any] = json.loads(found) if found else {}
        return Workload(**fields)

    def set(self, name: str, task: str, workload: Workload) -> None:
        value = {"samples": workload.samples, "rates": dict(workload.rates)}
        self._ledger.hset(names.WORKLOADS, _workload(name, task), json.dumps(value))


def _workload(name: str, task: str) -> str:
    return f"{name}|{task}"
