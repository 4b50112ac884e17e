"""Metrics in the text format of Prometheus.

Names follow its conventions: they end with the unit, and counters with ``_total``. The number of
labels is bounded: at most :data:`MAX_JOBS` active jobs, and the pools, store nodes, and states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from vcasgd.store.ledger.job import MAX_STALENESS, JobRecord, JobState
from vcasgd.store.ledger.workers import Traffic
from vcasgd.store.quotas import ServerGauges

CONTENT_TYPE = CONTENT_TYPE_LATEST
#: Number of the newest active jobs that are exported; each has about forty series.
MAX_JOBS = 100


@dataclass(frozen=True)
class JobSources:
    """Data of an active job."""

    record: JobRecord
    workers: int
    spent_usd: float
    traffic: Traffic


@dataclass(frozen=True)
class MetricSources:
    """Data of one scrape."""

    version: str
    controller: bool
    states: Mapping[JobState, int]
    jobs: Sequence[JobSources]
    #: Heartbeats of the parameter servers, by store node.
    heartbeats: Mapping[str, Mapping[str, Any]]
    ledger: ServerGauges
    machines: Mapping[str, Mapping[str, Any]]


def exposition(sources: MetricSources) -> bytes:
    """Return the metrics as UTF-8 text."""
    registry = CollectorRegistry()
    registry.register(_SingleScrape(sources))
    return generate_latest(registry)


class _SingleScrape(Collector):
    def __init__(self, sources: MetricSources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        sources = self._sources
        version = {"version": sources.version}
        yield InfoMetricFamily("vcasgd_build", "Version of the platform.", version)
        yield GaugeMetricFamily(
            "vcasgd_controller_up", "1 if a controller is running.", float(sources.controller)
        )
        states = [((state.value,), float(sources.states.get(state, 0))) for state in JobState]
        yield _gauge("vcasgd_jobs", "Jobs by state.", ["state"], states)
        yield from _jobs(sources.jobs)
        yield from _store(sources.heartbeats, sources.ledger)
        yield from _fleet(sources.machines)


Rows = Iterable[tuple[Sequence[str], float]]


def _gauge(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _counter(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


# -- jobs ---------------------------------------------------------------------------------------


def _jobs(jobs: Sequence[JobSources]) -> Iterator[Metric]:
    by, records = ["job"], [each.record for each in jobs]
    for name, text, field in (
        ("vcasgd_job_updates", "Applied updates.", "updates"),
        ("vcasgd_job_samples", "Applied samples.", "applied"),
    ):
        totals = [((job.id,), float(job.totals.get(field, 0))) for job in records]
        yield _counter(name, text, by, totals)
    rejected = [
        ((job.id, reason), float(count))
        for job in records
        for reason, count in job.totals.get("rejected", {}).items()
    ]
    yield _counter(
        "vcasgd_job_updates_rejected", "Rejected updates by reason.", ["job", "reason"], rejected
    )
    lost = [
        ((job.id, how), float(count))
        for job in records
        for how, count in (("notice", job.evictions), ("kill", job.kills))
    ]
    yield _counter(
        "vcasgd_job_machines_lost", "Lost machines, with or without a notice.", ["job", "how"], lost
    )
    epochs = [((job.id,), float(job.finished_epochs)) for job in records]
    yield _gauge("vcasgd_job_epochs_finished", "Completely applied epochs.", by, epochs)
    workers = [((each.record.id,), float(each.workers)) for each in jobs]
    yield _gauge("vcasgd_job_workers", "Running workers.", by, workers)
    yield from _traffic(jobs)
    spent = [((each.record.id,), each.spent_usd) for each in jobs]
    yield _counter("vcasgd_job_spent_usd", "Cost of the job's machines.", by, spent)
    accuracy = [
        ((job.id,), job.evaluations[-1].metrics["accuracy"])
        for job in records
        if job.evaluations and "accuracy" in job.evaluations[-1].metrics
    ]
    yield _gauge("vcasgd_job_accuracy_ratio", "Accuracy in the newest evaluation.", by, accuracy)
    yield _staleness(records)


def _traffic(jobs: Sequence[JobSources]) -> Iterator[Metric]:
    pushed = [((job.record.id,), float(job.traffic.pushed_bytes)) for job in jobs]
    yield _counter("vcasgd_job_pushed_bytes", "Updates that workers pushed.", ["job"], pushed)
    fetched = [((job.record.id,), float(job.traffic.fetched_bytes)) for job in jobs]
    yield _counter("vcasgd_job_fetched_bytes", "Snapshots that workers fetched.", ["job"], fetched)


def _staleness(jobs: Sequence[JobRecord]) -> Metric:
    text = "Staleness of applied updates, in versions."
    family = HistogramMetricFamily("vcasgd_job_staleness_versions", text, labels=["job"])
    for job in jobs:
        counts = {int(key): n for key, n in job.totals.get("staleness", {}).items()}
        edges = [0, 1, 2, 4, 8, 16, MAX_STALENESS - 1]
        below = [sum(n for at, n in counts.items() if at <= edge) for edge in edges]
        buckets = [(f"{edge}.0", float(n)) for edge, n in zip(edges, below, strict=True)]
        every = ("+Inf", float(sum(counts.values())))
        family.add_metric([job.id], [*buckets, every], float(job.totals.get("staleness_sum", 0)))
    return family


# -- servers ------------------------------------------------------------------------------------


def _store(heartbeats: Mapping[str, Mapping[str, Any]], ledger: ServerGauges) -> Iterator[Metric]:
    def each(field: str) -> Rows:
        rows = {
            **{node: heartbeat.get(field) for node, heartbeat in heartbeats.items()},
            "ledger": vars(ledger).get(field),
        }
        return [((name,), float(value)) for name, value in rows.items() if value is not None]

    by = ["server"]
    yield _gauge("vcasgd_store_memory_bytes", "Memory in use.", by, each("memory_used_bytes"))
    yield _gauge(
        "vcasgd_store_memory_limit_bytes",
        "Configured memory limit in bytes.",
        by,
        each("memory_limit_bytes"),
    )
    yield GaugeMetricFamily(
        "vcasgd_ledger_full",
        "1 near the ledger's memory limit: new jobs are refused.",
        float(ledger.full),
    )
    yield _gauge(
        "vcasgd_store_operations_per_second",
        "Current operations per second.",
        by,
        each("operations_per_second"),
    )
    yield _gauge("vcasgd_store_replicas", "Connected replicas.", by, each("replicas"))
    nodes = heartbeats.items()
    queued = [((node,), float(sum((row.get("queued") or {}).values()))) for node, row in nodes]
    yield _gauge("vcasgd_store_updates_queued", "Updates that wait to be applied.", by, queued)
    times = [((node,), float(row["at"])) for node, row in nodes if row.get("at") is not None]
    yield _gauge(
        "vcasgd_store_heartbeat_timestamp_seconds",
        "Time of the parameter server's last heartbeat.",
        by,
        times,
    )
    missing = [((node,), float(bool(row.get("unreplicated")))) for node, row in nodes]
    yield _gauge("vcasgd_store_unreplicated", "1 if replicas are missing.", by, missing)


# -- machines -----------------------------------------------------------------------------------


def _fleet(machines: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    count = Counter((_text(row, "pool"), _text(row, "state")) for row in machines.values())
    rows = [(key, float(number)) for key, number in sorted(count.items())]
    yield _gauge("vcasgd_fleet_machines", "Machines by pool and state.", ["pool", "state"], rows)
    usd: dict[str, float] = {}
    for row in machines.values():
        pool = _text(row, "pool")
        usd[pool] = usd.get(pool, 0.0) + float(row.get("price_per_hour") or 0.0)
    spend = [((pool,), value) for pool, value in sorted(usd.items())]
    yield _gauge(
        "vcasgd_fleet_spend_usd_per_hour", "Cost of all machines per hour.", ["pool"], spend
    )


def _text(row: Mapping[str, Any], field: str) -> str:
    return str(row.get(field) or "")
