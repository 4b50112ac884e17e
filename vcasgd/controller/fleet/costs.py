"""Keeps the machines' meters: who pays for what, and what it was good for."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from vcasgd.controller.fleet.names import worker_name
from vcasgd.fleet.costs import Charge, Doing, Meter, accrued, charge, last_charge, opened, report
from vcasgd.fleet.providers.base import Instance, InstanceState
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.costs import Costs
from vcasgd.store.ledger.jobs import Jobs

log = logging.getLogger(__name__)

#: a machine that is gone may be listed again for a while, and must not be paid twice
REMEMBERED_SECONDS = 24 * 3600.0


class CostLedger:
    """Every machine that is listed has a meter; the ledger has all of them, so a restarted
    controller goes on where they stand."""

    def __init__(self, ledger: RedisClient) -> None:
        self._costs = Costs(ledger)
        self._jobs = Jobs(ledger)
        self._seen: dict[str, float] = {}
        self._meters: dict[str, Meter] = {}
        self._load()

    @property
    def payers(self) -> dict[str, str]:
        """Machine to who pays for it."""
        return {
            name: meter.job
            for name, meter in self._meters.items()
            if meter.job is not None and not meter.closed
        }

    def payer(self, machine: str) -> str | None:
        """Also of one that is gone."""
        meter = self._meters.get(machine)
        return meter.job if meter else None

    def spent(self, job: str, now: float) -> float:
        """USD, also what is not booked yet."""
        open_ = sum(accrued(each, now) for each in self._meters.values() if each.job == job)
        return report(self._costs.of(job)).spent_usd + open_

    def paid_by(self, job: str, machines: Iterable[Instance]) -> list[Instance]:
        payers = self.payers
        return [one for one in machines if payers.get(one.id) == job]

    def ended(self, machine: str) -> bool:
        """It is known to be gone."""
        meter = self._meters.get(machine)
        return meter is not None and meter.closed

    def launched(self, machines: Iterable[Instance], jobs: Iterable[str]) -> None:
        """Machines that were granted, at the price that was offered, and for whom."""
        for one, job in zip(machines, jobs, strict=False):
            if one.id not in self._meters:
                meter = opened(one, job, Doing.BOOTING, one.launched_at)
                self._book(Charge(one.id, None, meter))

    def look(
        self,
        machines: Iterable[Instance],
        *,
        nodes: frozenset[str] | None,
        joined: Iterable[str],
        works_for: Mapping[str, str],
        coming: Iterable[str],
        billing_seconds: float,
        now: float,
    ) -> None:
        """Books what each machine cost since it was booked last.

        ``nodes``: of machines that are in the cluster, ``None`` where that is not known;
        ``joined``: that were; ``works_for``: machine to job; ``coming``: granted, not listed yet;
        ``billing_seconds``: what a machine is charged for at least.
        """
        known, listed = {*joined, *(nodes or ())}, set()
        for one in machines:
            listed.add(one.id)
            self._seen[one.id] = now
            job = works_for.get(one.id)
            due = charge(self._meters.get(one.id), one, job, _doing(one, job, known), now)
            if due is not None:
                self._book(due)
        for name in self._meters.keys() - listed - set(coming):
            self._end(name, billing_seconds, now)

    def _end(self, name: str, billing_seconds: float, now: float) -> None:
        meter = self._meters[name]
        if meter.closed:
            if now - meter.until > REMEMBERED_SECONDS:
                self._costs.remove_meters([name])
                del self._meters[name]
                self._seen.pop(name, None)
            return
        never_there = name not in self._seen and meter.until == meter.since
        billing = 0.0 if never_there else billing_seconds
        seen = self._seen.get(name, meter.until)
        due = last_charge(name, meter, seen, billing, self._unpushed(name, meter))
        if due is not None:
            self._book(due)

    def _unpushed(self, name: str, meter: Meter) -> float | None:
        """As the last heartbeat of its worker says, which is not to be trusted with more."""
        if meter.job is None:
            return None
        beat = self._jobs.workers(meter.job).get(worker_name(name, meter.job))
        return beat.unpushed_since if beat else None

    def _book(self, due: Charge) -> None:
        before = due.before.to_json() if due.before else None
        booked = self._costs.book(due.instance, before, due.after.to_json(), due.job, due.amounts())
        if booked:
            self._meters[due.instance] = due.after
        else:
            log.warning("%s: somebody else moved its meter", due.instance)
            self._load()

    def _load(self) -> None:
        self._meters = {name: Meter.from_json(text) for name, text in self._costs.meters().items()}


def _doing(one: Instance, job: str | None, known: set[str]) -> Doing:
    if job is not None:
        return Doing.WORKING
    booting = one.id not in known and one.state in (InstanceState.BOOTING, InstanceState.RUNNING)
    return Doing.BOOTING if booting else Doing.IDLE
