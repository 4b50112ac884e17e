"""Measurement of the store: throughput, latency, memory and processor time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure.figures import Figures, ProcessFigures
from benchmarks.measure.gauges import ProcessGauges
from benchmarks.measure.loopback import carried_bytes, measure_loopback
from benchmarks.measure.rig import BenchWorkload, Rig
from vcasgd.errors import StackError
from vcasgd.learning.encodings import CODECS
from vcasgd.settings import separate_settings
from vcasgd.store.tensors.snapshot import Snapshot

#: Uncounted time and updates, for caches, connections and buffers to fill.
WARM_UP_SECONDS = 1.0
WARM_UP_UPDATES_PER_WORKER = 3
#: Seconds until the measurement fails; any working exchange of any size needs less.
WARM_UP_LIMIT_SECONDS = 300.0
#: Seconds between two samples of memory.
SAMPLE_SECONDS = 0.1
SOAK_SAMPLE_SECONDS = 5.0

#: Callback that prints progress.
Print = Callable[[str], None]


@dataclass(frozen=True)
class StoreBenchOptions:
    """Options of a measurement.

    ``worker_socket`` is ``tcp`` or ``unix``; ``memory_mb`` limits each tensors server.
    """

    size_mb: int = 64
    workers: int = 2
    seconds: float = 6.0
    codec: str = "float32"
    store_nodes: int = 1
    worker_socket: str = "tcp"
    memory_mb: int | None = None
    soak: bool = False

    @property
    def workload(self) -> BenchWorkload:
        return BenchWorkload(
            floats=self.size_mb * (1 << 20) // 4,
            workers=self.workers,
            codec=self.codec,
            nodes=self.store_nodes,
            near=self.worker_socket == "unix",
        )


@dataclass(frozen=True)
class Moment:
    """All counters at one moment.

    ``snapshots`` has one entry per shard; ``versions`` and ``publications`` are sums over the
    shards.
    """

    at: float
    snapshots: list[Snapshot]
    versions: int
    publications: int
    fetched: float
    applied: dict[str, int]
    carried: int

    @classmethod
    def now(cls, rig: Rig) -> Moment:
        versions, publications = rig.beats()
        return cls(
            at=time.monotonic(),
            snapshots=rig.snapshots(),
            versions=versions,
            publications=publications,
            fetched=sum(tally.fetched for tally in rig.tallies.values()),
            applied={name: tally.applied for name, tally in rig.tallies.items()},
            carried=carried_bytes(),
        )


def measure(options: StoreBenchOptions, log: Print) -> Figures:
    """Start all processes, measure, and clean up. Call it in the main thread.

    Raises :class:`~vcasgd.errors.StackError` if a process fails or no update is applied.
    """
    log("measuring the loopback")
    loopback = [measure_loopback(options.workload.model_bytes)]
    with Rig(options.workload, separate_settings()) as rig:
        figures = _run(options, rig, log)
    log("measuring the loopback again")
    loopback.append(measure_loopback(options.workload.model_bytes))
    return figures.against(loopback)


def _run(options: StoreBenchOptions, rig: Rig, log: Print) -> Figures:
    gauges = ProcessGauges()
    for name, pid in rig.servers.items():
        gauges.watch(name, pid)
    if options.memory_mb is not None:
        rig.limit_memory(options.memory_mb)
    log(f"starting {options.workers} workers")
    rig.start()
    for name, pid in rig.workers.items():
        gauges.watch(name, pid, rig.tallies[name].baseline)
    _warm_up(rig)
    log(f"measuring for {options.seconds:.0f} s")
    before = Moment.now(rig)
    gauges.begin()
    _sample(rig, gauges, before.at + options.seconds, options.soak)
    gauges.end()
    return _figures(options, rig, gauges, before, Moment.now(rig))


def _warm_up(rig: Rig) -> None:
    started = time.monotonic()

    def warm() -> bool:
        slowest = min(tally.applied for tally in rig.tallies.values())
        late = time.monotonic() > started + WARM_UP_SECONDS
        return late and slowest >= WARM_UP_UPDATES_PER_WORKER

    rig.await_truth(warm, WARM_UP_LIMIT_SECONDS, "update of every worker")


def _sample(rig: Rig, gauges: ProcessGauges, until: float, soak: bool) -> None:
    pause = SOAK_SAMPLE_SECONDS if soak else SAMPLE_SECONDS
    while (now := time.monotonic()) < until:
        gauges.sample(now)
        rig.check()
        time.sleep(min(pause, max(0.0, until - time.monotonic())))
    gauges.sample(time.monotonic())


def _figures(
    options: StoreBenchOptions, rig: Rig, gauges: ProcessGauges, before: Moment, after: Moment
) -> Figures:
    shards = list(zip(before.snapshots, after.snapshots, strict=True))
    updates = min(last.meta.totals.updates - first.meta.totals.updates for first, last in shards)
    if not updates:
        raise StackError(
            f"no update was applied within {options.seconds:.0f} s",
            remedy="measure longer, or use a smaller model",
        )
    updates_per_s = _updates_per_second(shards)
    versions = after.versions - before.versions
    publications = (after.publications - before.publications) / versions if versions else 1.0
    delays = np.concatenate(
        [tally.delays(before.applied[name]) for name, tally in rig.tallies.items()]
    )
    workload, codec = options.workload, CODECS[options.codec]()
    return Figures(
        size_mb=options.size_mb,
        workers=options.workers,
        codec=options.codec,
        worker_socket=options.worker_socket,
        seconds=round(after.at - before.at, 2),
        updates=updates,
        updates_per_s=updates_per_s,
        publishes_per_s=publications * updates_per_s,
        fetches_per_s=(after.fetched - before.fetched) / (after.at - before.at),
        payload_bytes=codec.encoded_size(workload.floats),
        fetch_bytes=workload.model_bytes // 2 if codec.name == "bfloat16" else workload.model_bytes,
        model_bytes=workload.model_bytes,
        p50_push_to_applied_ms=_percentile(delays, 50),
        p99_push_to_applied_ms=_percentile(delays, 99),
        loopback_bytes_per_update=(after.carried - before.carried) / updates,
        rejected=sum(sum(each.meta.totals.rejected.values()) for each in after.snapshots),
        processes={
            name: ProcessFigures.of(gauge, workload.model_bytes, soak=options.soak)
            for name, gauge in gauges.all.items()
        },
        **rig.server_facts(),
    )


def _updates_per_second(shards: list[tuple[Snapshot, Snapshot]]) -> float:
    """Return the mean rate of the shards; each update has a part in each shard.

    Rates are taken between two publications, because a fixed window would cut one in two.
    """
    rates = [
        (last.meta.totals.updates - first.meta.totals.updates)
        / (last.meta.created_at - first.meta.created_at)
        for first, last in shards
    ]
    return sum(rates) / len(rates)


def _percentile(seconds: NDArray[np.float64], percent: float) -> float | None:
    return float(np.percentile(seconds, percent)) * 1000 if len(seconds) else None
