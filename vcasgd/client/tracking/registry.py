"""Trackers by name."""

from __future__ import annotations

import importlib
from pathlib import Path

from vcasgd.client.tracking.base import Tracker
from vcasgd.errors import SpecError
from vcasgd.schemas.jobs import JobView
from vcasgd.spec.track import TrackerKind


def tracker_kind(name: str) -> TrackerKind:
    """Return the tracker of a name. Raises :class:`SpecError`."""
    try:
        return TrackerKind(name)
    except ValueError:
        known = ", ".join(TrackerKind)
        raise SpecError(
            f"to: there is no tracker {name!r}", remedy=f"choose from {known}", field="to"
        ) from None


def open_tracker(kind: TrackerKind, job: JobView, folder: Path, project: str) -> Tracker:
    """Open the run of a job in a tracker; create it unless it exists.

    ``folder`` is for files of TensorBoard and W&B; ``project`` is the project of W&B and the
    experiment of MLflow. Raises :class:`SpecError` if the tracker's library is not installed.
    """
    module = f"vcasgd.client.tracking.to_{kind}"
    try:
        opened: Tracker = importlib.import_module(module).open_run(job, folder / job.id, project)
    except ImportError as error:
        raise SpecError(
            f"{error.name} is not installed",
            remedy=f"pip install 'vcasgd[{kind}]'",
            field="to",
        ) from error
    return opened
