"""Points of a job's history for trackers.

The step is the number of updates in the model, for training and validation alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from vcasgd.client.tracking.base import Points, Position
from vcasgd.schemas.fleet import WorkerRow
from vcasgd.schemas.history import MetricRow
from vcasgd.schemas.jobs import EvaluationView, JobView

#: Workers of a job whose own metrics are exported, the first ones by name.
MAX_WORKERS = 32
#: Fields of the metrics by their names in trackers.
NAMES = {
    "train/loss": "loss",
    "progress/epochs": "finished_epochs",
    "progress/samples": "samples",
    "rate/updates_per_second": "updates_per_second",
    "rate/samples_per_second": "samples_per_second",
    "staleness/mean": "staleness_mean",
    "staleness/max": "staleness_max",
    "staleness/implicit_momentum": "implicit_momentum",
    "updates/mixing_factor": "mixing_factor",
    "updates/rejected": "rejected",
    "updates/waiting": "waiting",
    "fleet/workers": "workers",
    "cost/spent_usd": "spent_usd",
}


def new_points(
    rows: Sequence[MetricRow], evaluations: Sequence[EvaluationView], position: Position
) -> Iterator[Points]:
    """Yield points and evaluations after a position, in the order of their steps.

    ``rows`` start after the position, oldest first.
    """
    waiting = sorted(
        (
            evaluation
            for evaluation in evaluations
            if not position.has_evaluation(evaluation.version)
        ),
        key=lambda each: each.version,
    )
    for row in rows:
        while waiting and row.version is not None and waiting[0].version <= row.version:
            point = _evaluation(waiting.pop(0), position)
            position = point.position
            yield point
        position = position.after_point(row.id)
        if row.version is not None:
            yield Points(row.version, row.at, _values(row), position)
    for evaluation in waiting:
        point = _evaluation(evaluation, position)
        position = point.position
        yield point


def worker_points(workers: Sequence[WorkerRow], job: JobView, position: Position) -> list[Points]:
    """Return a point with what a job's workers use at present, and no point without workers."""
    values = {
        f"system/{worker.name}/{name}": float(value)
        for worker in sorted(workers, key=lambda each: each.name)[:MAX_WORKERS]
        for name, value in _used(worker).items()
        if value is not None
    }
    return [Points(job.version or 0, time.time(), values, position)] if values else []


def _used(worker: WorkerRow) -> dict[str, float | None]:
    gpu = None
    if worker.gpu_memory_bytes is not None and worker.gpu_memory_free_bytes is not None:
        gpu = worker.gpu_memory_bytes - worker.gpu_memory_free_bytes
    return {
        "cpu_percent": worker.cpu_percent,
        "memory_bytes": worker.resident_bytes,
        "gpu_memory_bytes": gpu,
        "sent_bytes": worker.pushed_bytes,
        "received_bytes": worker.fetched_bytes,
    }


def _values(row: MetricRow) -> dict[str, float]:
    found = ((tag, getattr(row, name)) for tag, name in NAMES.items())
    return {tag: float(value) for tag, value in found if value is not None}


def _evaluation(evaluation: EvaluationView, position: Position) -> Points:
    values = {
        f"validation/{name}": value
        for name, value in evaluation.metrics.items()
        if value is not None and math.isfinite(value)
    }
    values["validation/seconds"] = evaluation.seconds
    values["validation/epoch"] = evaluation.epoch
    after = position.after_evaluation(evaluation.version)
    return Points(evaluation.version, evaluation.at, values, after)
