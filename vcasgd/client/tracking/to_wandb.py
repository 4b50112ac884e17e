"""Runs of Weights & Biases; ``WANDB_MODE=offline`` writes them to a folder.

The run has the job's ID, so a new export continues it. The position is in a file beside the run's
own files, because an offline run can't be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import wandb

from vcasgd.client.tracking.base import Points, Position, Tracker, parameters
from vcasgd.errors import ApiError
from vcasgd.schemas.jobs import JobView
from vcasgd.spec.job import JobState

#: File with the position, and the value that is the x-axis. W&B's own step can't go back, but an
#: evaluation arrives later than the points after its model.
STATE_FILE, AXIS = "wandb.json", "progress/updates"


class WandbRun(Tracker):
    """The run of a project with the job's ID."""

    def __init__(self, job: JobView, folder: Path, project: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._state = folder / STATE_FILE
        self.position = Position.load(self._state)
        self._job, self._folder, self._project = job, folder, project
        self._run: wandb.Run | None = None

    @property
    def place(self) -> str:
        return str((self._run and self._run.url) or self._folder)

    def log(self, points: Sequence[Points]) -> None:
        run = self._run = self._run or self._open()
        for point in points:
            run.log({**point.values, AXIS: point.step, "_timestamp": point.at})
        self.position = points[-1].position
        self.position.save(self._state)

    def close(self, ended: JobView | None = None) -> None:
        failed = ended is not None and ended.state is not JobState.SUCCEEDED
        if self._run is not None:
            self._run.finish(exit_code=int(failed))

    def _open(self) -> wandb.Run:
        try:
            run = wandb.init(
                project=self._project,
                id=self._job.id,
                name=self._job.id,
                resume="allow",
                dir=str(self._folder),
                config=parameters(self._job),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise ApiError(f"W&B: {error}", remedy="run wandb login") from error
        run.define_metric(AXIS)
        run.define_metric("*", step_metric=AXIS)
        return run
