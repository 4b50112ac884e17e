"""Conversion of records of the store and the fleet to the API's schemas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, nan
from typing import Any

from vcasgd.fleet.costs import report
from vcasgd.schemas.base import finite
from vcasgd.schemas.costs import CostReport, PoolCostView, PoolSpend, SpendView
from vcasgd.schemas.fleet import JobBrief, NodeView, ServerGaugesView, StoreView
from vcasgd.schemas.history import (
    CheckpointRow,
    SpanView,
    StalenessBucket,
    StalenessView,
    TimelineView,
)
from vcasgd.schemas.jobs import BestView, JobView, ProgressView, TrafficView
from vcasgd.storage.checkpoints import StoredCheckpoint
from vcasgd.store.ledger.job import JobRecord

# -- jobs ---------------------------------------------------------------------------------------


def job_view(job: JobRecord, traffic: TrafficView, loss: float | None = None) -> JobView:
    """Return the view of a job, with the bytes that its workers have moved, and its newest loss."""
    return JobView.model_validate(
        {
            **_row(job),
            "deadline": job.deadline,
            "progress": _progress(job),
            "traffic": traffic,
            "loss": finite(loss),
            "store_nodes": job.facts.store_nodes if job.facts else None,
        }
    )


def job_brief(job: JobRecord, workers: int, amounts: Mapping[str, float]) -> JobBrief:
    """Return the row of a job in the overview. ``amounts``: its costs in the ledger."""
    accuracy = job.evaluations[-1].metrics.get("accuracy") if job.evaluations else None
    costs = report(amounts)
    return JobBrief.model_validate(
        {
            **_row(job),
            "fraction": fraction(job),
            "updates": job.totals.get("updates", 0),
            "accuracy": finite(accuracy),
            "workers": 0 if job.state.over else workers,
            "max_workers": job.spec.workers.max,
            "spent_usd": costs.spent_usd,
            "on_demand_usd": costs.on_demand_usd,
        }
    )


def _row(job: JobRecord) -> dict[str, Any]:
    place = {"position": job.queue[0], "length": job.queue[1]} if job.queue else None
    status = "queued" if job.queued else job.state.value
    named = {"name": job.spec.name, "status": status, "queue": place, "best": _best(job)}
    return {**vars(job), **named}


def _best(job: JobRecord) -> BestView | None:
    """Return None while no evaluation has a finite value of the metric that ranks them."""
    best, metric = job.best, job.metric
    value = best.metrics.get(metric.name, nan) if best and metric else nan
    if best is None or metric is None or not isfinite(value):
        return None
    return BestView.model_validate(
        {**vars(best), "metric": metric.name, "mode": metric.mode, "value": value}
    )


def checkpoint_rows(
    job: JobRecord, stored: Sequence[StoredCheckpoint], details: Mapping[str, Mapping[str, Any]]
) -> list[CheckpointRow]:
    """Return the stored checkpoints with their evaluations. ``details``: by name, as listed."""
    evaluated = {evaluation.versions: evaluation for evaluation in job.evaluations}
    best = job.best.versions if job.best and _best(job) else None
    last = job.model or (stored[-1].name if stored else None)
    rows = []
    for checkpoint in stored:
        known = details.get(checkpoint.name, {})
        versions = tuple(known.get("versions") or (checkpoint.version,))
        evaluation = evaluated.get(versions)
        found = {
            "place": evaluation.place if evaluation else None,
            "metrics": evaluation.metrics if evaluation else None,
            "best": versions == best,
            "last": checkpoint.name == last,
        }
        rows.append(CheckpointRow.model_validate({**known, **vars(checkpoint), **found}))
    return rows


def fraction(job: JobRecord) -> float:
    """Return the applied part of all samples, from 0 to 1."""
    applied, total = job.samples
    return min(1.0, applied / total) if total else 0.0


def _progress(job: JobRecord) -> ProgressView:
    applied, total = job.samples
    skipped = int(job.totals.get("skipped", 0))
    # a job that stopped early left samples out; it did not lose them
    complete = job.state.over and job.epochs is not None and job.finished_epochs >= job.epochs
    return ProgressView(
        epochs=job.epochs,
        finished_epochs=job.finished_epochs,
        subtasks_total=job.plan.total_subtasks if job.plan else job.spec.known_subtasks,
        samples_expected=total,
        samples_applied=applied - skipped,
        samples_skipped=skipped,
        samples_repeated=int(job.totals.get("repeated", 0)),
        samples_lost=total - applied if total is not None and complete else None,
        fraction=fraction(job),
    )


def staleness_view(job: JobRecord) -> StalenessView:
    counts = {int(key): int(n) for key, n in job.totals.get("staleness", {}).items()}
    buckets = [
        StalenessBucket(staleness=each, updates=counts.get(each, 0))
        for each in range(max(counts, default=-1) + 1)
    ]
    return StalenessView(
        buckets=buckets,
        mean=float(job.totals.get("staleness_mean", 0.0)),
        max=int(job.totals.get("staleness_max", 0)),
    )


def timeline_view(machine: str, lane: Mapping[str, Any], job: JobRecord) -> TimelineView | None:
    """Return a machine's work for a job, without what it did before and after.

    ``lane``: its entry in the ledger. Returns None for a machine that did nothing for the job.
    """
    view = TimelineView.model_validate({**lane, "machine": machine})
    spans = [each for span in view.spans if (each := _within(span, job.created_at, job.ended_at))]
    return view.model_copy(update={"spans": spans}) if spans else None


def _within(span: SpanView, start: float, end: float | None) -> SpanView | None:
    """Return the part of a span from ``start`` to ``end``; None if there is none."""
    if (span.until is not None and span.until <= start) or (end is not None and span.since > end):
        return None
    changes: dict[str, float] = {"since": max(start, span.since)}
    # the controller no longer updates machines of a job that has ended
    if end is not None and span.state != "dead":
        changes["until"] = end if span.until is None else min(span.until, end)
    return span.model_copy(update=changes)


# -- costs --------------------------------------------------------------------------------------


def spend_view(
    machines: Iterable[Mapping[str, Any]],
    pools: Mapping[str, Mapping[str, Any]],
    reports: Iterable[CostReport],
) -> SpendView:
    """Return the current cost of all machines, and the cost of some jobs so far."""
    machines = list(machines)
    costs = [part for cost_report in reports for part in cost_report.pools]
    names = sorted({*pools, *(part.pool for part in costs), *map(_pool, machines)})
    spending = [_pool_spend(name, pools.get(name, {}), machines, costs) for name in names]
    spent = sum(pool.spent_usd for pool in spending)
    on_demand = sum(pool.on_demand_usd for pool in spending)
    return SpendView(
        usd_per_hour=sum(pool.usd_per_hour for pool in spending),
        on_demand_usd_per_hour=sum(
            machine.get("on_demand_price_per_hour") or 0 for machine in machines
        ),
        spent_usd=spent,
        on_demand_usd=on_demand,
        saved_usd=on_demand - spent,
        pools=spending,
    )


def _pool_spend(
    name: str,
    pool: Mapping[str, Any],
    machines: Iterable[Mapping[str, Any]],
    costs: Iterable[PoolCostView],
) -> PoolSpend:
    machines = [machine for machine in machines if _pool(machine) == name]
    parts = [part for part in costs if part.pool == name]
    return PoolSpend(
        pool=name,
        machines=len(machines),
        usd_per_hour=sum(machine.get("price_per_hour") or 0.0 for machine in machines),
        spent_usd=sum(part.usd for part in parts),
        on_demand_usd=sum(part.on_demand_usd for part in parts),
        offers=pool.get("offers"),
    )


def _pool(machine: Mapping[str, Any]) -> str:
    return str(machine.get("pool") or "")


# -- the store ----------------------------------------------------------------------------------


def store_view(heartbeats: Mapping[str, Mapping[str, Any]], ledger: ServerGaugesView) -> StoreView:
    """Return the state of all servers, from the parameter servers' heartbeats by node."""
    # each parameter server reports since when its own writes to the ledger lack a replica
    times = [_unreplicated(heartbeat, "ledger") for heartbeat in heartbeats.values()]
    since = min((at for at in times if at is not None), default=None)
    return StoreView(
        nodes=[
            NodeView.model_validate(
                {**each, "node": node, "unreplicated_since": _unreplicated(each, "tensors")}
            )
            for node, each in sorted(heartbeats.items())
        ],
        ledger=ledger.model_copy(update={"unreplicated_since": since}),
    )


def _unreplicated(heartbeat: Mapping[str, Any], server: str) -> float | None:
    since: float | None = (heartbeat.get("unreplicated") or {}).get(server)
    return since
