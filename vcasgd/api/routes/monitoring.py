"""Routes for health checks and for Prometheus.

Names of metrics follow its conventions: they end with the unit, and counters with ``_total``. The
number of labels is bounded: at most :data:`MAX_JOBS` active jobs, and the pools, store nodes, and
states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Response, status
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

import vcasgd
from vcasgd.api.access import METRICS, Services, ServicesDep
from vcasgd.errors import StoreError
from vcasgd.logging import isolated
from vcasgd.schemas.fleet import ServerGaugesView
from vcasgd.schemas.jobs import TrafficView
from vcasgd.schemas.service import Health
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.job import MAX_STALENESS, JobRecord, JobState
from vcasgd.store.quotas import read_gauges

router = APIRouter(tags=["health"])

#: Seconds after which a ledger counts as unavailable; a health check needs a prompt answer.
READY_SECONDS = 2.0
#: Number of the newest active jobs that are exported; each has about forty series.
MAX_JOBS = 100
#: Threads that no other request uses, so that a silent ledger can't occupy them all.
_THREADS = CapacityLimiter(8)


@router.get("/healthz")
async def healthz() -> Health:
    """Return 200 while the process runs."""
    return Health(status="ok")


@router.get(
    "/readyz",
    responses={503: {"model": Health, "description": "Requests would fail; see `reasons`."}},
)
async def readyz(services: ServicesDep, response: Response) -> Health:
    """Check within two seconds that the ledger answers."""
    reason = await _ledger_error(services.ledger)
    if reason is None:
        return Health(status="ok")
    response.status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    return Health(status="unavailable", reasons=[reason])


async def _ledger_error(ledger: RedisClient) -> str | None:
    """Return why the ledger is unavailable. The text is public, so it contains no address."""
    try:
        with anyio.fail_after(READY_SECONDS):
            await to_thread.run_sync(ledger.ping, abandon_on_cancel=True, limiter=_THREADS)
    except TimeoutError:
        return f"the ledger does not answer within {READY_SECONDS:g} s"
    except StoreError as error:
        return f"the ledger: {type(error).__name__}"
    return None


# -- metrics ------------------------------------------------------------------------------------


# Prometheus defines the format, so the OpenAPI document leaves it out
@router.get(METRICS, include_in_schema=False)
def get_metrics(services: ServicesDep) -> Response:
    """Export metrics; clients on this machine need no token."""
    registry = CollectorRegistry()
    registry.register(_Scrape(services))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class _Scrape(Collector):
    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        services = self._services
        yield from _platform(services.control.held(), services.jobs.states())
        yield from _jobs(list(_sources(services)))
        yield from _store(services.servers.all(), read_gauges(services.ledger))
        yield from _fleet(services.control.machines())


def empty_metrics() -> Iterator[Metric]:
    """Yield all metrics with their descriptions and labels, and without measured values."""
    yield from _platform(False, {})
    yield from _jobs(())
    none = ServerGaugesView(memory_used_bytes=0, operations_per_second=0, replicas=0)
    yield from _store({}, none)
    yield from _fleet({})


def _platform(controlled: bool, counts: Mapping[JobState, int]) -> Iterator[Metric]:
    version = {"version": vcasgd.__version__}
    yield InfoMetricFamily("vcasgd_build", "Version of the platform.", version)
    text = "1 if a controller is running."
    yield GaugeMetricFamily("vcasgd_controller_up", text, float(controlled))
    states = [((state.value,), counts.get(state, 0)) for state in JobState]
    yield _gauge("vcasgd_jobs", "Jobs by state.", ["state"], states)


@dataclass(frozen=True)
class _JobSources:
    record: JobRecord
    workers: int
    spent_usd: float
    traffic: TrafficView


def _sources(services: Services) -> Iterator[_JobSources]:
    """Yield the data of the active jobs that can be read."""
    jobs = services.jobs
    for name in jobs.active()[-MAX_JOBS:]:
        with isolated(name):
            yield _JobSources(
                jobs.get(name),
                jobs.workers.count(name),
                services.costs.spent(name),
                services.beats.traffic(name),
            )


Rows = Iterable[tuple[Sequence[str], float]]


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    rows: Rows,
) -> Metric:
    family = kind(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, float(value))
    return family


_gauge, _counter = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)
_Number = tuple[Callable[..., Metric], str, str, Callable[[_JobSources], float]]
_OF_JOBS: tuple[_Number, ...] = (
    (_counter, "vcasgd_job_updates", "Applied updates.",
     lambda job: job.record.totals.get("updates", 0)),
    (_counter, "vcasgd_job_samples", "Applied samples.",
     lambda job: job.record.totals.get("applied", 0)),
    (_gauge, "vcasgd_job_epochs_finished", "Completely applied epochs.",
     lambda job: job.record.finished_epochs),
    (_gauge, "vcasgd_job_workers", "Running workers.", lambda job: job.workers),
    (_counter, "vcasgd_job_pushed_bytes", "Updates that workers pushed.",
     lambda job: job.traffic.pushed_bytes),
    (_counter, "vcasgd_job_fetched_bytes", "Snapshots that workers fetched.",
     lambda job: job.traffic.fetched_bytes),
    (_counter, "vcasgd_job_spent_usd", "Cost of the job's machines.", lambda job: job.spent_usd),
)  # fmt: skip


def _jobs(jobs: Sequence[_JobSources]) -> Iterator[Metric]:
    for family, name, text, value in _OF_JOBS:
        yield family(name, text, ["job"], [((job.record.id,), value(job)) for job in jobs])
    records = [job.record for job in jobs]
    rejected = [
        ((job.id, reason), count)
        for job in records
        for reason, count in job.totals.get("rejected", {}).items()
    ]
    yield _counter(
        "vcasgd_job_updates_rejected", "Rejected updates by reason.", ["job", "reason"], rejected
    )
    lost = [
        ((job.id, how), count)
        for job in records
        for how, count in (("notice", job.evictions), ("kill", job.kills))
    ]
    yield _counter(
        "vcasgd_job_machines_lost", "Lost machines, with or without a notice.", ["job", "how"], lost
    )
    accuracy = [
        ((job.id,), job.evaluations[-1].metrics["accuracy"])
        for job in records
        if job.evaluations and "accuracy" in job.evaluations[-1].metrics
    ]
    text = "Accuracy in the newest evaluation."
    yield _gauge("vcasgd_job_accuracy_ratio", text, ["job"], accuracy)
    yield _staleness(records)


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


def _store(
    heartbeats: Mapping[str, Mapping[str, Any]], ledger: ServerGaugesView
) -> Iterator[Metric]:
    by, nodes = ["server"], heartbeats.items()
    for name, text, field in (
        ("vcasgd_store_memory_bytes", "Memory in use.", "memory_used_bytes"),
        ("vcasgd_store_memory_limit_bytes", "Configured memory limit in bytes.",
         "memory_limit_bytes"),
        ("vcasgd_store_operations_per_second", "Current operations per second.",
         "operations_per_second"),
        ("vcasgd_store_replicas", "Connected replicas.", "replicas"),
    ):  # fmt: skip
        values = [*((node, row.get(field)) for node, row in nodes), ("ledger", vars(ledger)[field])]
        yield _gauge(name, text, by, [((each,), value) for each, value in values
                                      if value is not None])  # fmt: skip
    text = "1 near the ledger's memory limit: new jobs are refused."
    yield GaugeMetricFamily("vcasgd_ledger_full", text, float(ledger.full))
    queued = [((node,), sum((row.get("queued") or {}).values())) for node, row in nodes]
    yield _gauge("vcasgd_store_updates_queued", "Updates that wait to be applied.", by, queued)
    times = [((node,), row["at"]) for node, row in nodes if row.get("at") is not None]
    text = "Time of the parameter server's last heartbeat."
    yield _gauge("vcasgd_store_heartbeat_timestamp_seconds", text, by, times)
    missing = [((node,), bool(row.get("unreplicated"))) for node, row in nodes]
    yield _gauge("vcasgd_store_unreplicated", "1 if replicas are missing.", by, missing)


def _fleet(machines: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    count = Counter((_text(row, "pool"), _text(row, "state")) for row in machines.values())
    rows = sorted(count.items())
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
