"""Meters of all machines: which job pays for each, and what the machine does for it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from vcasgd.controller.fleet.worker_names import worker_name
from vcasgd.fleet.costs import Charge, Doing, Meter, accrued, charge, last_charge, opened, report
from vcasgd.fleet.providers.base import Instance, InstanceState
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.costs import Booking, Costs
from vcasgd.store.ledger.worker_beats import read_beats

log = logging.getLogger(__name__)

#: Seconds that the meter of an ended machine is kept: a cloud may list it again for a while.
REMEMBERED_SECONDS = 24 * 3600.0


class CostLedger:
    """Keeps one meter per machine; a restarted controller continues from the ledger's meters."""

    def __init__(self, ledger: RedisClient) -> None:
        self._costs = Costs(ledger)
        self._ledger = ledger
        self._seen: dict[str, float] = {}
        self._meters: dict[str, Meter] = {}
        self._load()

    @property
    def payers(self) -> dict[str, str]:
        """Job that pays for each machine."""
        return {
            name: meter.job
            for name, meter in self._meters.items()
            if meter.job is not None and not meter.closed
        }

    def payer(self, machine: str) -> str | None:
        """Return the job that pays for a machine, also for one that has ended."""
        meter = self._meters.get(machine)
        return meter.job if meter else None

    def spent(self, job: str, now: float) -> float:
        """Return what a job has spent in USD, including the time that is not booked yet."""
        open_ = sum(accrued(each, now) for each in self._meters.values() if each.job == job)
        return report(self._costs.of(job)).spent_usd + open_

    def paid_by(self, job: str, machines: Iterable[Instance]) -> list[Instance]:
        """Return the machines that a job pays for."""
        payers = self.payers
        return [one for one in machines if payers.get(one.id) == job]

    def ended(self, machine: str) -> bool:
        """Return True if a machine is known to have ended."""
        meter = self._meters.get(machine)
        return meter is not None and meter.closed

    def launched(self, machines: Iterable[Instance], jobs: Iterable[str]) -> None:
        """Open the meters of launched machines, at the price of their offer, for these jobs."""
        self._book(
            [
                Charge(one.id, None, opened(one, job, Doing.BOOTING, one.launched_at))
                for one, job in zip(machines, jobs, strict=False)
                if one.id not in self._meters
            ]
        )

    def record(
        self,
        machines: Iterable[Instance],
        *,
        joined: Collection[str],
        works_for: Mapping[str, str],
        unlisted: Iterable[str],
        billing_seconds: float,
        now: float,
    ) -> None:
        """Book what each machine cost since it was booked last.

        ``joined``: machines that are or were in the cluster. ``works_for``: machine to job.
        ``unlisted``: launched machines that are not listed yet. ``billing_seconds``: the least
        time that a cloud bills.
        """
        listed, charges = set(), []
        for one in machines:
            listed.add(one.id)
            self._seen[one.id] = now
            job = works_for.get(one.id)
            due = charge(self._meters.get(one.id), one, job, _doing(one, job, joined), now)
            if due is not None:
                charges.append(due)
        gone = self._meters.keys() - listed - set(unlisted)
        self._book(charges + self._last_charges(gone, billing_seconds))
        self._forget(gone, now)

    def _last_charges(self, gone: Iterable[str], billing_seconds: float) -> list[Charge]:
        meters = {name: self._meters[name] for name in gone if not self._meters[name].closed}
        unpushed = self._unpushed(meters)
        charges = []
        for name, meter in meters.items():
            never_listed = name not in self._seen and meter.until == meter.since
            billing = 0.0 if never_listed else billing_seconds
            seen = self._seen.get(name, meter.until)
            charges.append(last_charge(name, meter, seen, billing, unpushed.get(name)))
        return [each for each in charges if each is not None]

    def _unpushed(self, meters: Mapping[str, Meter]) -> dict[str, float | None]:
        """Return since when each machine's worker had unpushed work, by its last heartbeat."""
        workers = {
            (meter.job, worker_name(name, meter.job)): name
            for name, meter in meters.items()
            if meter.job is not None
        }
        beats = read_beats(self._ledger, workers) if workers else {}
        return {workers[worker]: beat.unpushed_since for worker, beat in beats.items()}

    def _forget(self, gone: Iterable[str], now: float) -> None:
        old = [
            name
            for name in gone
            if self._meters[name].closed and now - self._meters[name].until > REMEMBERED_SECONDS
        ]
        self._costs.remove_meters(old)
        for name in old:
            del self._meters[name]
            self._seen.pop(name, None)

    def _book(self, charges: Sequence[Charge]) -> None:
        bookings = [
            Booking(
                due.instance,
                due.before.to_json() if due.before else None,
                due.after.to_json(),
                due.job,
                due.amounts(),
            )
            for due in charges
        ]
        booked = self._costs.book(bookings)
        self._meters |= {
            due.instance: due.after for due, done in zip(charges, booked, strict=True) if done
        }
        others = [due.instance for due, done in zip(charges, booked, strict=True) if not done]
        if others:
            log.warning("%s: another controller advanced the meter", ", ".join(others))
            self._load()

    def _load(self) -> None:
        self._meters = {name: Meter.from_json(text) for name, text in self._costs.meters().items()}


def _doing(one: Instance, job: str | None, joined: Collection[str]) -> Doing:
    if job is not None:
        return Doing.WORKING
    booting = one.id not in joined and one.state in (InstanceState.BOOTING, InstanceState.RUNNING)
    return Doing.BOOTING if booting else Doing.IDLE
