"""A job's history as TensorBoard event files.

The step is the number of updates in the model, for training and validation alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from vcasgd.errors import ApiError
from vcasgd.schemas.history import MetricRow
from vcasgd.schemas.jobs import EvaluationView

#: Fields of the metrics by TensorBoard tag.
TAGS = {
    "train/loss": "loss",
    "progress/epochs": "finished_epochs",
    "progress/samples": "samples",
    "rate/updates_per_second": "updates_per_second",
    "rate/samples_per_second": "samples_per_second",
    "staleness/mean": "staleness_mean",
    "staleness/max": "staleness_max",
    "updates/rejected": "rejected",
    "updates/waiting": "waiting",
    "fleet/workers": "workers",
    "cost/spent_usd": "spent_usd",
}
_FILES = "events.out.tfevents.*"


class EventFiles:
    """Writer of one job's event files, which replaces existing ones in ``folder``.

    TensorBoard may read the files meanwhile. Raises :class:`~vcasgd.errors.ApiError` if
    TensorBoard is not installed, and :class:`OSError`.
    """

    def __init__(self, folder: Path) -> None:
        writer = _writer()
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard would draw the points of several files over each other
        for old in folder.glob(_FILES):
            old.unlink()
        self._writer = writer(str(folder))
        self._evaluated: set[tuple[float, int]] = set()

    def __enter__(self) -> EventFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.close()

    def add_points(self, rows: Iterable[MetricRow]) -> None:
        """Add points of the metrics, oldest first, each once."""
        for row in rows:
            for tag, name in TAGS.items():
                self._add(tag, getattr(row, name), row.version, row.at)
        self._writer.flush()

    def add_evaluations(self, evaluations: Iterable[EvaluationView]) -> None:
        """Add the evaluations that are new."""
        for each in evaluations:
            if (each.epoch, each.version) in self._evaluated:
                continue
            self._evaluated.add((each.epoch, each.version))
            for name, value in each.metrics.items():
                self._add(f"validation/{name}", value, each.version, each.at)
        self._writer.flush()

    def _add(self, tag: str, value: float | None, step: int | None, at: float) -> None:
        if value is not None and step is not None:
            self._writer.add_scalar(tag, float(value), step, wall_time=at)


def _writer() -> Any:
    try:
        from tensorboard.summary import Writer
    except ImportError as error:
        raise ApiError(
            "TensorBoard is not installed", remedy="pip install 'vcasgd[tensorboard]'"
        ) from error
    return Writer
