"""Speeds of machines, measured from the heartbeats of their workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from vcasgd.fleet.observed import Rates
from vcasgd.fleet.providers.base import Machine
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.costs import Workload, Workloads
from vcasgd.store.ledger.heartbeats import Heartbeat
from vcasgd.store.ledger.job import JobRecord
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
        return {
            (pool, kind): rate
            for name, rate in self._of(job).rates.items()
            for pool, _, kind in [name.partition("|")]
        }

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
        before = self._of(job)
        after = replace(before, rates={**before.rates, **medians})
        if job.facts:
            after = replace(after, samples=job.facts.samples, batch_size=job.facts.batch_size)
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
