"""Everything that is counted, in the text format of Prometheus.

Names follow its conventions: a unit at the end, ``_total`` for what only grows. Labels are
bounded: jobs that are not over, at most :data:`MOST_JOBS`; pools, store nodes and states.
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

from vcasgd.store.gauges import ServerGauges
from vcasgd.store.ledger.job import JobRecord, JobState
from vcasgd.store.tensors.snapshot import MOST_STALENESS

CONTENT_TYPE = CONTENT_TYPE_LATEST
#: each has some forty series
MOST_JOBS = 100


@dataclass(frozen=True)
class MetricSources:
    """What is told at one scrape; ``jobs`` are active, with their workers and USD."""

    version: str
    controller: bool
    states: Mapping[JobState, int]
    jobs: Sequence[tuple[JobRecord, int, float]]
    beats: Mapping[str, Mapping[str, Any]]
    ledger: ServerGauges
    instances: Mapping[str, Mapping[str, Any]]


def exposition(facts: MetricSources) -> bytes:
    """The text, as UTF-8."""
    registry = CollectorRegistry()
    registry.register(_Once(facts))
    return generate_latest(registry)


class _Once(Collector):
    def __init__(self, facts: MetricSources) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        facts = self._facts
        yield InfoMetricFamily("vcasgd_build", "The version.", {"version": facts.version})
        yield _plain("vcasgd_controller_up", "Whether one is at work.", float(facts.controller))
        states = [((state.value,), float(facts.states.get(state, 0))) for state in JobState]
        yield _gauge("vcasgd_jobs", "Jobs by state.", ["state"], states)
        yield from _jobs(facts.jobs)
        yield from _store(facts.beats, facts.ledger)
        yield from _fleet(facts.instances)


Rows = Iterable[tuple[Sequence[str], float]]


def _plain(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


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


def _jobs(jobs: Sequence[tuple[JobRecord, int, float]]) -> Iterator[Metric]:
    def total(field: str) -> Rows:
        return [((job.id,), float(job.totals.get(field, 0))) for job, _, _ in jobs]

    by = ["job"]
    yield _counter("vcasgd_job_updates", "Updates applied.", by, total("updates"))
    yield _counter("vcasgd_job_samples", "Samples applied.", by, total("applied"))
    rejected = [
        ((job.id, reason), float(count))
        for job, _, _ in jobs
        for reason, count in job.totals.get("rejected", {}).items()
    ]
    yield _counter("vcasgd_job_updates_rejected", "By reason.", ["job", "reason"], rejected)
    lost = [
        ((job.id, how), float(count))
        for job, _, _ in jobs
        for how, count in (("notice", job.evictions), ("kill", job.kills))
    ]
    yield _counter("vcasgd_job_machines_lost", "With a notice or not.", ["job", "how"], lost)
    epochs = [((job.id,), float(job.finished_epochs)) for job, _, _ in jobs]
    yield _gauge("vcasgd_job_epochs_finished", "Epochs applied whole.", by, epochs)
    workers = [((job.id,), float(count)) for job, count, _ in jobs]
    yield _gauge("vcasgd_job_workers", "Workers at work.", by, workers)
    spent = [((job.id,), usd) for job, _, usd in jobs]
    yield _counter("vcasgd_job_spent_usd", "Cost of its machines.", by, spent)
    accuracy = [
        ((job.id,), job.evaluations[-1].metrics["accuracy"])
        for job, _, _ in jobs
        if job.evaluations and "accuracy" in job.evaluations[-1].metrics
    ]
    yield _gauge("vcasgd_job_accuracy_ratio", "Of the newest evaluation.", by, accuracy)
    yield _staleness([job for job, _, _ in jobs])


def _staleness(jobs: Sequence[JobRecord]) -> Metric:
    text = "Versions that the model was ahead of an update's base when it was applied."
    family = HistogramMetricFamily("vcasgd_job_staleness_versions", text, labels=["job"])
    for job in jobs:
        counts = {int(key): n for key, n in job.totals.get("staleness", {}).items()}
        edges = [0, 1, 2, 4, 8, 16, MOST_STALENESS - 1]
        below = [sum(n for at, n in counts.items() if at <= edge) for edge in edges]
        buckets = [(f"{edge}.0", float(n)) for edge, n in zip(edges, below, strict=True)]
        every = ("+Inf", float(sum(counts.values())))
        family.add_metric([job.id], [*buckets, every], float(job.totals.get("staleness_sum", 0)))
    return family


# -- servers ------------------------------------------------------------------------------------


def _store(beats: Mapping[str, Mapping[str, Any]], ledger: ServerGauges) -> Iterator[Metric]:
    told = vars(ledger)

    def each(field: str) -> Rows:
        rows = {
            **{node: beat.get(field) for node, beat in beats.items()},
            "ledger": told.get(field),
        }
        return [((name,), float(value)) for name, value in rows.items() if value is not None]

    by = ["server"]
    yield _gauge("vcasgd_store_memory_bytes", "In use.", by, each("memory_used_bytes"))
    yield _gauge("vcasgd_store_memory_limit_bytes", "Set.", by, each("memory_limit_bytes"))
    yield _gauge("vcasgd_store_operations_per_second", "Now.", by, each("operations_per_second"))
    yield _gauge("vcasgd_store_replicas", "Connected.", by, each("replicas"))
    nodes = beats.items()
    queued = [((node,), float(sum((beat.get("queued") or {}).values()))) for node, beat in nodes]
    yield _gauge("vcasgd_store_updates_queued", "That wait to be applied.", by, queued)
    heard = [((node,), float(beat["at"])) for node, beat in nodes if beat.get("at") is not None]
    yield _gauge("vcasgd_store_heartbeat_timestamp_seconds", "Of the server.", by, heard)
    missing = [((node,), float(bool(beat.get("unreplicated")))) for node, beat in nodes]
    yield _gauge("vcasgd_store_unreplicated", "Whether replicas are missing.", by, missing)


# -- machines -----------------------------------------------------------------------------------


def _fleet(instances: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    count = Counter((_text(row, "pool"), _text(row, "state")) for row in instances.values())
    rows = [(key, float(number)) for key, number in sorted(count.items())]
    yield _gauge("vcasgd_fleet_machines", "By pool and state.", ["pool", "state"], rows)
    usd: dict[str, float] = {}
    for row in instances.values():
        pool = _text(row, "pool")
        usd[pool] = usd.get(pool, 0.0) + float(row.get("price_per_hour") or 0.0)
    spend = [((pool,), value) for pool, value in sorted(usd.items())]
    yield _gauge("vcasgd_fleet_spend_usd_per_hour", "Of all machines.", ["pool"], spend)


def _text(row: Mapping[str, Any], field: str) -> str:
    return str(row.get(field) or "")
