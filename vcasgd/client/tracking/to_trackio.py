"""Runs of Trackio, which keeps them in the folder ``TRACKIO_DIR`` of this computer.

It writes in the background, so a run is open only for a moment: once it is closed, all points are
there, and the position can follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import trackio

from vcasgd.client.tracking.base import Points, Position, Tracker, parameters
from vcasgd.schemas.jobs import JobView

STATE_FILE = "trackio.json"


class TrackioRun(Tracker):
    """The run of a project with the job's ID as its name."""

    def __init__(self, job: JobView, folder: Path, project: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._job, self._project = job, project
        self._state = folder / STATE_FILE
        self.position = Position.load(self._state)

    @property
    def place(self) -> str:
        return f"{trackio.TRACKIO_DIR} project {self._project} run {self._job.id}"

    def log(self, points: Sequence[Points]) -> None:
        # It prints several lines whenever a run is opened and closed.
        with redirect_stdout(StringIO()):
            run = trackio.init(
                project=self._project,
                name=self._job.id,
                config=parameters(self._job),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
            for point in points:
                run.log(dict(point.values), step=point.step)
            run.finish()
        self.position = points[-1].position
        self.position.save(self._state)

    def close(self, ended: JobView | None = None) -> None:
        """Do nothing: a run of Trackio has no end."""
