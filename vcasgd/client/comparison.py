"""Comparison of jobs: their results, and what is different in their files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vcasgd.client.job import Job
from vcasgd.client.sweep import best_qualities, metric_of
from vcasgd.client.tracking.base import parameters
from vcasgd.spec.sections import Metric


def compare(jobs: Sequence[Job], metric: Metric | None = None) -> list[dict[str, Any]]:
    """Return a row for each job, the best one first.

    ``best`` is its best value of ``metric``, by default of the metric that ranks its models.
    ``differences`` are the fields of the job files that not all of them share.
    """
    fields = [parameters(job) for job in jobs]
    names = sorted({name for row in fields for name in row})
    different = [name for name in names if len({repr(row.get(name)) for row in fields}) > 1]
    rows: list[tuple[float, dict[str, Any]]] = []
    for job, own in zip(jobs, fields, strict=True):
        ranked, qualities = metric_of(job, metric), best_qualities(job, metric)
        quality = qualities[-1] if qualities else -math.inf
        took = job.ended_at - job.started_at if job.ended_at and job.started_at else None
        row = {
            "job": job.id,
            "state": job.state.value,
            "metric": ranked.name,
            "best": _value(ranked, quality),
            "evaluations": len(qualities),
            "samples": job.progress.samples_applied,
            "seconds": took,
            "spent_usd": job.cost().spent_usd,
            "differences": {name: own.get(name) for name in different},
        }
        rows.append((quality, row))
    rows.sort(key=lambda pair: -pair[0])
    return [row for _, row in rows]


def _value(metric: Metric, quality: float) -> float | None:
    """Return the metric's value of a quality; None if it has never been finite."""
    if not math.isfinite(quality):
        return None
    return quality if metric.mode == "max" else -quality
