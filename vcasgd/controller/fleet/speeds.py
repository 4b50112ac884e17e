"""Speeds and traffic of machines, measured from the heartbeats of their workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median

from vcasgd.fleet.observed import Rates
from vcasgd.fleet.providers.base import Machine
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.costs import Workload, Workloads
from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.untrusted import Heartbeat
from vcasgd.worker_names import machine_of

#: Seconds over which a worker is measured at least; the first samples are slower.
MEASURE_SECONDS = 10.0
#: Seconds between two writes of a job's speeds to the ledger.
WRITE_SECONDS = 10.0


class Speeds:
    """Measures samples per second of each machine since its first ones.

    The speed of a pool and machine type is the median of its machines, so that one worker with
    false reports does not decide which machines are bought.
    """

    def __init__(self, ledger: RedisClient) -> None:
        self._workloads = Workloads(ledger)
        #: By job and worker.
        self._first: defaultdict[str, dict[str, tuple[int | None, float, int]]] = defaultdict(dict)
        self._known: dict[str, Workload] = {}
        self._written: dict[str, float] = {}
        #: Workloads to write, by the name and the task of their jobs.
        self._changed: dict[tuple[str, str], Workload] = {}

    def rates(self, job: JobRecord) -> Rates:
        """Return the speeds by pool and type, from all jobs with the same name and task."""
        return self._of(job).speeds

    def measure(
        self,
        job: JobRecord,
        beats: Mapping[str, Heartbeat],
        machines: Mapping[str, Machine],
        now: float,
    ) -> None:
        """Measure a job's ``machines``, given by id; :meth:`write` writes what changed."""
        first = self._first[job.id]
        for name in first.keys() - beats.keys():
            del first[name]
        of_machine: defaultdict[str, float] = defaultdict(float)
        for worker, beat in beats.items():
            # The learners of a machine add up.
            of_machine[machine_of(worker)] += _rate(first, worker, beat) or 0.0
        speeds: defaultdict[str, list[float]] = defaultdict(list)
        for name, rate in of_machine.items():
            if (one := machines.get(name)) and rate > 0:
                speeds[f"{one.pool}|{one.machine_type}"].append(rate)
        medians = {name: median(rates) for name, rates in speeds.items()}
        self._keep(job, medians, _bytes_per_sample(beats.values()), now)

    def _keep(
        self, job: JobRecord, rates: Mapping[str, float], traffic: float | None, now: float
    ) -> None:
        before = self._of(job)
        samples = job.facts.samples if job.facts else before.samples
        batch_size = job.facts.batch_size if job.facts else before.batch_size
        rates = {**before.rates, **rates}
        after = replace(
            before,
            samples=samples,
            batch_size=batch_size,
            rates=rates,
            bytes_per_sample=traffic or before.bytes_per_sample,
        )
        if after != before and now - self._written.get(job.id, 0.0) >= WRITE_SECONDS:
            self._changed[job.spec.name, job.spec.task] = after
            self._known[job.id], self._written[job.id] = after, now

    def write(self) -> None:
        """Write the changed speeds of all jobs, in one round trip.

        Raises :class:`~vcasgd.errors.StoreUnavailable`; the next call then writes them too.
        """
        if self._changed:
            self._workloads.set(self._changed)
            self._changed = {}

    def _of(self, job: JobRecord) -> Workload:
        if job.id not in self._known:
            self._known[job.id] = self._workloads.get(job.spec.name, job.spec.task)
        return self._known[job.id]


def _bytes_per_sample(beats: Iterable[Heartbeat]) -> float | None:
    """Return the bytes that workers pushed and fetched for a sample; None if nothing is known."""
    known = [
        (beat.pushed_bytes + beat.fetched_bytes, beat.samples)
        for beat in beats
        if beat.samples and beat.pushed_bytes and beat.fetched_bytes
    ]
    return sum(each for each, _ in known) / sum(each for _, each in known) if known else None


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
