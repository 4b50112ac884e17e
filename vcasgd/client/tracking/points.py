"""Points of a job's history for trackers.

The step is the number of updates in the model, for training and validation alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from vcasgd.client.tracking.base import Points, Position
from vcasgd.schemas.history import MetricRow
from vcasgd.schemas.jobs import EvaluationView

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
        (each for each in evaluations if not position.has_evaluation(each.version)),
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
    for each in waiting:
        point = _evaluation(each, position)
        position = point.position
        yield point


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
