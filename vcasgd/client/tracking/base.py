"""Points of a job for trackers, and the position up to which they were exported.

The step of a point is the number of updates in the model, for training and validation alike.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from vcasgd.errors import SpecError
from vcasgd.schemas.fleet import WorkerRow
from vcasgd.schemas.history import MetricRow
from vcasgd.schemas.jobs import EvaluationView, JobView
from vcasgd.spec.problems import first_mistake

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
#: Newest evaluations that a position names. Older ones count as exported.
EVALUATIONS_NAMED = 200


class Stored(BaseModel):
    """State that an export keeps for the next one, in a file or as text."""

    model_config = ConfigDict(frozen=True)

    @classmethod
    def parse(cls, text: str | None, where: str) -> Self:
        """Return what is stored, or the start without one. Raises :class:`SpecError`."""
        if text is None:
            return cls()
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise SpecError(
                f"{where} is damaged: {first_mistake(error)}",
                remedy="delete it; the whole history is exported again then",
            ) from error

    @classmethod
    def load(cls, file: Path) -> Self:
        """Return the content of a file, or the start without one. Raises :class:`SpecError`."""
        return cls.parse(file.read_text() if file.exists() else None, str(file))

    def save(self, file: Path) -> None:
        """Replace the content of a file, which is never half written."""
        new = file.with_name(f".{file.name}")
        new.write_text(self.model_dump_json())
        new.replace(file)


class Position(Stored):
    """The end of what a tracker has: the next export continues there."""

    #: ID of the last point of the metrics.
    point: str | None = None
    #: Versions of the newest evaluated models.
    evaluated: tuple[int, ...] = ()

    def has_evaluation(self, version: int) -> bool:
        full = len(self.evaluated) >= EVALUATIONS_NAMED
        return version in self.evaluated or (full and version < min(self.evaluated))

    def after_evaluation(self, version: int) -> Position:
        newest = sorted({*self.evaluated, version})[-EVALUATIONS_NAMED:]
        return self.model_copy(update={"evaluated": tuple(newest)})

    def after_point(self, point: str) -> Position:
        return self.model_copy(update={"point": point})


@dataclass(frozen=True)
class Points:
    """Values of one moment. ``step`` is the number of updates in the model, ``at`` a Unix time."""

    step: int
    at: float
    values: Mapping[str, float]
    #: Position after these values.
    position: Position = field(default_factory=Position, compare=False)


class Tracker(ABC):
    """A job's run in a tracker."""

    #: Position after the last export, or the start.
    position: Position

    @property
    @abstractmethod
    def place(self) -> str:
        """Folder or URL where people find the run."""

    @abstractmethod
    def log(self, points: Sequence[Points]) -> None:
        """Write points, and then the position after the last one."""

    @abstractmethod
    def close(self, ended: JobView | None = None) -> None:
        """Write what is buffered; with the job if it has ended."""


def parameters(job: JobView) -> dict[str, Any]:
    """Return the settings of a job's file as flat names, without those that are not set."""
    return dict(_flat("", job.spec.model_dump(mode="json", exclude={"secrets", "env"})))


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        inner = ((f"{prefix}.{name}" if prefix else name, each) for name, each in value.items())
        return [row for name, each in inner for row in _flat(name, each)]
    return [] if value is None or value == [] else [(prefix, value)]


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
        "gpu_utilization": worker.gpu_utilization,
        "samples_per_second": worker.samples_per_second,
        "flops_utilization": worker.flops_utilization,
        "sent_bytes": worker.pushed_bytes,
        "received_bytes": worker.fetched_bytes,
    }


def _values(row: MetricRow) -> dict[str, float]:
    found = ((tag, getattr(row, name)) for tag, name in NAMES.items())
    logged = ((f"logged/{name}", value) for name, value in (row.logged or {}).items())
    return {tag: float(value) for tag, value in (*found, *logged) if value is not None}


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
