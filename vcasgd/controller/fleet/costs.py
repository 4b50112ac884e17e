"""Costs and speeds of machines: which job pays for each, and how many samples it trains."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from vcasgd.fleet.costs import (
    CHARGE_SECONDS,
    Charge,
    Doing,
    Meter,
    accrued,
    charge,
    clock_amounts,
    last_charge,
    opened,
)
from vcasgd.fleet.deadline import span
from vcasgd.fleet.estimate import memory_text, total_samples
from vcasgd.schemas.costs import Workload
from vcasgd.schemas.fleet import Machine, MachineState
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.costs import Advance, Booking, Costs, Workloads, month_of
from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.untrusted import Heartbeat
from vcasgd.store.ledger.workers import read_beats
from vcasgd.worker_names import machine_of, worker_name

log = logging.getLogger(__name__)

#: Seconds that the meter of an ended machine is kept: a cloud may list it again for a while.
REMEMBERED_SECONDS = 24 * 3600.0
#: Seconds by which a clock in the ledger may be ahead of the time: those of controllers differ.
MAX_AHEAD_SECONDS = 600.0
#: Seconds over which a worker is measured at least; the first samples are slower.
MEASURE_SECONDS = 10.0
#: Seconds between two writes of a job's speeds to the ledger.
WRITE_SECONDS = 10.0


class CostLedger:
    """Keeps one meter per machine and one clock per job; a restarted controller continues from the
    ledger's.
    """

    def __init__(self, ledger: RedisClient) -> None:
        self._costs = Costs(ledger)
        self._ledger = ledger
        self._seen: dict[str, float] = {}
        self._meters: dict[str, Meter] = {}
        #: Open meters by the job that pays.
        self._paid: defaultdict[str, dict[str, Meter]] = defaultdict(dict)
        #: Clocks of all jobs that have paid for a machine; None for one that never advanced.
        self._clocks: dict[str, float | None] = {}
        self._load()

    @property
    def payers(self) -> dict[str, str]:
        """Job that pays for each machine."""
        return {name: job for job, meters in self._paid.items() for name in meters}

    def payer(self, machine: str) -> str | None:
        """Return the job that pays for a machine, also for one that has ended."""
        meter = self._meters.get(machine)
        return meter.job if meter else None

    def spent(self, job: str, now: float) -> float:
        """Return what a job has spent in USD, including the time that is not booked yet."""
        return self._costs.spent(job) + self._accrued(job, now)

    def spent_in_month(self, owners: Mapping[str, str | None], now: float) -> dict[str, float]:
        """Return what the jobs of each user cost in this month, with what is not booked yet.

        ``owners``: users by job. Others have an empty name.
        """
        spent = defaultdict(float, self._costs.spent_in(month_of(now)))
        for job in self._paid:
            spent[owners.get(job) or ""] += self._accrued(job, now)
        return dict(spent)

    def _accrued(self, job: str, now: float) -> float:
        clock = self._clocks.get(job) or 0.0
        return sum(accrued(each, now, clock) for each in self._paid.get(job, {}).values())

    @property
    def paid(self) -> dict[str, Collection[str]]:
        """Machines that each job pays for."""
        return {job: meters.keys() for job, meters in self._paid.items() if meters}

    def ended(self, machine: str) -> bool:
        """Return True if a machine is known to have ended."""
        meter = self._meters.get(machine)
        return meter is not None and meter.closed

    def launched(self, machines: Iterable[Machine], jobs: Iterable[str]) -> None:
        """Open the meters of launched machines, at the price of their offer, for these jobs.

        A machine may be listed before its launch is answered. Its meter has no payer yet, so the
        job pays for it from its launch on.
        """
        charges = []
        for one, job in zip(machines, jobs, strict=False):
            meter = self._meters.get(one.id)
            if meter is None or (meter.job is None and not meter.closed):
                first = opened(one, job, Doing.BOOTING, one.launched_at)
                charges.append(Charge(one.id, meter, first, first.until))
        self._book(charges)

    def record(
        self,
        machines: Iterable[Machine],
        *,
        joined: Collection[str],
        works_for: Mapping[str, str],
        unlisted: Iterable[str],
        billing_seconds: float,
        now: float,
    ) -> None:
        """Book what machines cost since they were booked last: those that changed at once, all
        others by advancing the clocks of their jobs.

        ``joined``: machines that are or were in the cluster. ``works_for``: machine to job.
        ``unlisted``: launched machines that are not listed yet. ``billing_seconds``: the least
        time that a cloud bills.
        """
        self._set_back(now)
        # After a step back of the time, nothing is booked until it has reached all clocks again.
        now = max([now, *(clock for clock in self._clocks.values() if clock)])
        listed = {one.id: one for one in machines}
        self._seen |= dict.fromkeys(listed, now)
        gone = self._meters.keys() - listed.keys() - set(unlisted)
        charges = self._charges(listed, works_for, joined, now)
        if self._book(charges + self._last_charges(gone, billing_seconds), now):
            self._advance(now)
        self._forget(gone, now)

    def _set_back(self, now: float) -> None:
        """Set back what a controller whose clock was far ahead has written, as nothing would be
        booked until then.
        """
        latest = now + MAX_AHEAD_SECONDS
        meters = {name: each for name, each in self._meters.items() if each.until > latest}
        self._book(
            [
                Charge(name, each, replace(each, since=min(each.since, now), until=now), now)
                for name, each in meters.items()
            ]
        )
        ahead = {job: clock for job, clock in self._clocks.items() if clock and clock > latest}
        if ahead:
            log.warning("the clocks of %s were far ahead", ", ".join(ahead))
            self._costs.book([Advance(job, at, now, {}) for job, at in ahead.items()])
            self._load()

    def _charges(
        self,
        machines: Mapping[str, Machine],
        works_for: Mapping[str, str],
        joined: Collection[str],
        now: float,
    ) -> list[Charge]:
        charges = []
        for name, one in machines.items():
            meter, job = self._meters.get(name), works_for.get(name)
            doing = Doing.WORKING if job is not None else _doing(one, joined)
            if due := charge(meter, one, job, doing, now, self._clock(meter)):
                charges.append(due)
        return charges

    def _clock(self, meter: Meter | None) -> float:
        return (self._clocks.get(meter.job) if meter and meter.job else None) or 0.0

    def _advance(self, now: float) -> None:
        """Advance the clocks of all jobs that pay for machines, if it is time."""
        due = [
            Advance(job, clock, now, clock_amounts(meters.values(), clock or 0.0, now))
            for job, meters in self._paid.items()
            for clock in [self._clocks.get(job)]
            if meters and now - (clock or 0.0) >= CHARGE_SECONDS
        ]
        advanced = self._costs.book(due, now)
        self._clocks |= {each.job: now for each, done in zip(due, advanced, strict=True) if done}
        if others := [each.job for each, done in zip(due, advanced, strict=True) if not done]:
            log.warning("%s: another controller advanced the clock", ", ".join(others))
            self._load()

    def _last_charges(self, gone: Iterable[str], billing_seconds: float) -> list[Charge]:
        meters = {name: self._meters[name] for name in gone if not self._meters[name].closed}
        unpushed = self._unpushed(meters)
        charges = []
        for name, meter in meters.items():
            never_listed = name not in self._seen and meter.until == meter.since
            billing = 0.0 if never_listed else billing_seconds
            seen, clock = self._seen.get(name, meter.until), self._clock(meter)
            charges.append(last_charge(name, meter, seen, billing, unpushed.get(name), clock))
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
        if old:
            payers = {meter.job for meter in self._meters.values()}
            for job in self._clocks.keys() - payers:
                del self._clocks[job]
                self._paid.pop(job, None)

    def _book(self, charges: Sequence[Charge], now: float | None = None) -> bool:
        """Book charges; return False if another controller has advanced a meter or a clock."""
        if not charges:
            return True
        self._load_clocks({due.after.job for due in charges if due.after.job} - self._clocks.keys())
        bookings = [
            Booking(
                due.machine,
                due.before.to_json() if due.before else None,
                due.after.to_json(),
                due.job,
                due.amounts(),
                self._clocks.get(due.job) if due.job else None,
            )
            for due in charges
        ]
        booked = self._costs.book(bookings, now)
        for due, done in zip(charges, booked, strict=True):
            if done:
                self._keep(due.machine, due.after)
        others = [due.machine for due, done in zip(charges, booked, strict=True) if not done]
        if others:
            log.warning("%s: another controller advanced the meter", ", ".join(others))
            self._load()
        return not others

    def _keep(self, machine: str, meter: Meter) -> None:
        before = self._meters.get(machine)
        if before is not None and before.job is not None:
            self._paid[before.job].pop(machine, None)
        self._meters[machine] = meter
        if meter.job is not None and not meter.closed:
            self._paid[meter.job][machine] = meter

    def _load(self) -> None:
        self._meters, self._paid = {}, defaultdict(dict)
        for name, text in self._costs.meters().items():
            self._keep(name, Meter.from_json(text))
        self._clocks = {}
        self._load_clocks({meter.job for meter in self._meters.values() if meter.job})

    def _load_clocks(self, jobs: Collection[str]) -> None:
        if jobs:
            clocks = self._costs.clocks(jobs)
            self._clocks |= {job: clocks.get(job) for job in jobs}


def _doing(one: Machine, joined: Collection[str]) -> Doing:
    """Return what a machine without a worker does."""
    if one.state is MachineState.WAITING:
        return Doing.WAITING
    return Doing.BOOTING if one.id not in joined and one.state.stays else Doing.IDLE


@dataclass
class _Measured:
    """Measurements of an active job's machines."""

    workload: Workload
    #: Process, time, and number of the first samples of each worker.
    first: dict[str, tuple[int | None, float, int]] = field(default_factory=dict)
    #: Seconds from launch to first samples of the machines launched for the job.
    starts: dict[str, float] = field(default_factory=dict)
    written_at: float = 0.0
    #: True if the job's duration was estimated.
    estimated: bool = False


class Speeds:
    """Measures samples per second of each machine since its first ones.

    The speed of a pool and machine type is the median of its machines, so that one worker with
    false reports does not decide which machines are bought.
    """

    def __init__(self, ledger: RedisClient) -> None:
        self._workloads = Workloads(ledger)
        self._jobs: dict[str, _Measured] = {}
        #: Workloads to write, by the name and the task of their jobs.
        self._changed: dict[tuple[str, str], Workload] = {}

    def workload(self, job: JobRecord) -> Workload:
        """Return what is known of all jobs with the same name and task."""
        return self._of(job).workload

    def total_samples(self, job: JobRecord) -> int | None:
        """Return the samples of the whole job, before its facts are known those of earlier jobs."""
        return job.samples[1] or total_samples(job.spec, self.workload(job))

    def measure(
        self,
        job: JobRecord,
        beats: Mapping[str, Heartbeat],
        machines: Mapping[str, Machine],
        now: float,
    ) -> None:
        """Measure a job's ``machines``, given by id; :meth:`write` writes what changed.

        A type without measurements has the rate of its first local steps until it is measured.
        """
        known = self._of(job)
        first, starts = known.first, known.starts
        for name in first.keys() - beats.keys():
            del first[name]
        measured = {worker: _rate(first, worker, beat) for worker, beat in beats.items()}
        early = {worker: _first_rate(beat) for worker, beat in beats.items()}
        rates = {
            **_medians(early, machines), **known.workload.rates, **_medians(measured, machines),
        }  # fmt: skip
        for worker, (_, at, _) in first.items():
            one = machines.get(machine_of(worker))
            # A machine that was there before the job didn't boot for it.
            if one is not None and one.launched_at >= job.created_at:
                starts.setdefault(one.id, at - one.launched_at)
        start = median(starts.values()) if starts else None
        self._keep(job, rates, beats.values(), start, now)

    def estimate(self, job: JobRecord, beats: Mapping[str, Heartbeat]) -> str | None:
        """Return how long a job takes and what memory it needs, once its first steps are known."""
        rates = [rate for beat in beats.values() if (rate := _first_rate(beat))]
        known = self._of(job)
        if known.estimated or not rates or job.facts is None:
            return None
        known.estimated = True
        work = Workload(samples=job.facts.samples, batch_size=job.facts.batch_size)
        samples, speed = total_samples(job.spec, work), sum(rates)
        if samples is None:
            return None
        length, workers = job.spec.length, f"{len(rates)} worker{'s'[: len(rates) != 1]}"
        lasts = span(max(1.0, samples / speed))
        text = (
            f"{length} take{'s' * length.startswith('1 ')} about {lasts} at "
            f"{speed:{'.3g' if speed < 1000 else ',.0f'}} samples/s, the speed of the first steps "
            f"of {workers}"
        )
        needed = memory_text(known.workload.memory_bytes, known.workload.gpu_memory_bytes)
        return f"{text}; each needs about {needed}" if needed else text

    def _keep(
        self,
        job: JobRecord,
        rates: Mapping[str, float],
        beats: Collection[Heartbeat],
        start_seconds: float | None,
        now: float,
    ) -> None:
        known, traffic = self._of(job), _bytes_per_sample(beats)
        before = known.workload
        samples = job.facts.samples if job.facts else before.samples
        batch_size = job.facts.batch_size if job.facts else before.batch_size
        memory = [beat.resident_bytes or 0 for beat in beats if beat.steps]
        gpu = [
            (beat.gpu_memory_bytes or 0) - (beat.gpu_memory_free_bytes or 0)
            for beat in beats
            if beat.steps
        ]
        after = replace(
            before,
            samples=samples,
            batch_size=batch_size,
            rates=rates,
            bytes_per_sample=traffic or before.bytes_per_sample,
            memory_bytes=max(memory, default=0) or before.memory_bytes,
            gpu_memory_bytes=max([0, *gpu]) or before.gpu_memory_bytes,
            start_seconds=before.start_seconds if start_seconds is None else start_seconds,
        )
        # A short job ends before the next write.
        first = after.rates.keys() != before.rates.keys()
        if after != before and (first or now - known.written_at >= WRITE_SECONDS):
            self._changed[job.spec.name, job.spec.task] = after
            known.workload, known.written_at = after, now

    def write(self) -> None:
        """Write the changed speeds of all jobs, in one round trip.

        Raises :class:`~vcasgd.errors.StoreUnavailable`; the next call then writes them too.
        """
        if self._changed:
            self._workloads.set(self._changed)
            self._changed = {}

    def keep(self, jobs: Iterable[JobRecord]) -> None:
        """Forget what is known of all other jobs."""
        self._jobs = {job.id: self._jobs[job.id] for job in jobs if job.id in self._jobs}

    def _of(self, job: JobRecord) -> _Measured:
        if job.id not in self._jobs:
            workload = self._workloads.get(job.spec.name, job.spec.task)
            self._jobs[job.id] = _Measured(workload)
        return self._jobs[job.id]


def _bytes_per_sample(beats: Iterable[Heartbeat]) -> float | None:
    """Return the bytes that workers pushed and fetched for a sample; None if nothing is known."""
    known = [
        (beat.pushed_bytes + beat.fetched_bytes, beat.samples)
        for beat in beats
        if beat.samples and beat.pushed_bytes and beat.fetched_bytes
    ]
    return sum(each for each, _ in known) / sum(each for _, each in known) if known else None


def _medians(
    rates: Mapping[str, float | None], machines: Mapping[str, Machine]
) -> dict[str, float]:
    """Return samples per second of a machine by pool and type. ``rates``: those of workers."""
    of_machine: defaultdict[str, float] = defaultdict(float)
    for worker, rate in rates.items():
        # The learners of a machine add up.
        of_machine[machine_of(worker)] += rate or 0.0
    speeds: defaultdict[str, list[float]] = defaultdict(list)
    for name, rate in of_machine.items():
        if (one := machines.get(name)) and rate > 0:
            speeds[f"{one.pool}|{one.machine_type}"].append(rate)
    return {name: median(each) for name, each in speeds.items()}


def _first_rate(beat: Heartbeat) -> float | None:
    """Return a worker's samples per second in its last steps; None before the first ones.

    The first exchanges of a large model take far longer than later ones, which overlap with steps,
    so the time of steps says more than that of everything.
    """
    if beat.samples and beat.steps and beat.step_seconds:
        return beat.samples / beat.steps / beat.step_seconds
    return beat.samples_per_second or None


def _rate(
    first: dict[str, tuple[int | None, float, int]], worker: str, beat: Heartbeat
) -> float | None:
    """Return a worker's speed since its first samples, which are kept in ``first``."""
    process, at, samples = beat.pid, beat.at, beat.samples
    if at is None or not samples:
        return None
    start = first.get(worker)
    if start is None or start[0] != process or samples < start[2]:
        first[worker] = (process, at, samples)
        return None
    seconds = at - start[1]
    rate = (samples - start[2]) / seconds if seconds >= MEASURE_SECONDS else 0.0
    return rate if rate > 0 else None
