"""Export of a job's history to experiment trackers. Each tracker has a module of its own."""

from __future__ import annotations

import importlib
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vcasgd.client.following import PATIENCE_SECONDS, retried
from vcasgd.client.tracking.base import Tracker, new_points, worker_points
from vcasgd.errors import SpecError

if TYPE_CHECKING:
    from vcasgd.client.job import Job

#: Class of each tracker, in the module ``to_…`` of its name.
RUNS = {
    "tensorboard": "TensorBoardRun",
    "mlflow": "MlflowRun",
    "wandb": "WandbRun",
    "trackio": "TrackioRun",
}
#: Points of a long history; TensorBoard itself shows a thousand of each curve.
HISTORY_POINTS = 5000
#: Points that are written before their position.
POINTS_AT_ONCE = 500
#: Seconds between two readings of new points.
REFRESH_SECONDS = 2.0
#: Seconds between two points of the workers' own metrics.
SYSTEM_SECONDS = 10.0


def export(job: Job, to: str, folder: Path, project: str, *, follow: bool) -> str:
    """Export a job's history to a tracker. See :meth:`vcasgd.client.Job.track`."""
    tracker, ended = _open(to, job, folder, project), None
    next_system, patience = 0.0, PATIENCE_SECONDS if follow else 0.0
    try:
        while True:
            after = tracker.position.point
            rows = retried(partial(job.metrics, after, points=HISTORY_POINTS), patience)
            new = list(new_points(rows, job.evaluations, tracker.position))
            for first in range(0, len(new), POINTS_AT_ONCE):
                tracker.log(new[first : first + POINTS_AT_ONCE])
            ended = job if job.over else None
            if ended or not follow:
                return tracker.place
            if time.monotonic() >= next_system:
                next_system = time.monotonic() + SYSTEM_SECONDS
                workers = retried(job.workers, patience)
                if used := worker_points(workers, job, tracker.position):
                    tracker.log(used)
            time.sleep(REFRESH_SECONDS)
            job = retried(job.refreshed, patience)
    finally:
        tracker.close(ended)


def _open(to: str, job: Job, folder: Path, project: str) -> Tracker:
    """Open the run of a job in a tracker; create it unless it exists."""
    if to not in RUNS:
        remedy = f"choose from {', '.join(RUNS)}"
        raise SpecError(f"to: there is no tracker {to!r}", remedy=remedy, field="to")
    try:
        module = importlib.import_module(f"vcasgd.client.tracking.to_{to}")
        opened: Tracker = getattr(module, RUNS[to])(job, folder / job.id, project)
    except ImportError as error:
        raise SpecError(
            f"{error.name} is not installed", remedy=f"pip install 'vcasgd[{to}]'", field="to"
        ) from error
    return opened
