"""TensorBoard's event files.

Files of several exports follow each other. What an export wrote after the position that it
recorded last is removed by the next one, so each point is there exactly once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from tensorboard.summary import Writer

from vcasgd.client.tracking.base import Points, Position, Stored, Tracker
from vcasgd.schemas.jobs import JobView

STATE_FILE = "vcasgd.json"
_FILES = "events.out.tfevents.*"


class _Written(Stored):
    """The content of the state file: the position, and the sizes of the files up to there."""

    position: Position = Position()
    files: dict[str, int] = Field(default={})


class TensorBoardRun(Tracker):
    """A folder with event files. TensorBoard may read them meanwhile."""

    def __init__(self, job: JobView, folder: Path, project: str) -> None:  # noqa: ARG002
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._state = folder / STATE_FILE
        written = _Written.load(self._state)
        self.position = written.position
        for file in folder.glob(_FILES):
            if size := written.files.get(file.name):
                os.truncate(file, size)
            else:
                file.unlink()
        self._writer: Writer | None = None

    @property
    def place(self) -> str:
        return str(self._folder)

    def log(self, points: Sequence[Points]) -> None:
        if self._writer is None:
            self._writer = Writer(str(self._folder))
        for point in points:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.step, wall_time=point.at)
        self._writer.flush()
        self.position = points[-1].position
        sizes = {file.name: file.stat().st_size for file in self._folder.glob(_FILES)}
        _Written(position=self.position, files=sizes).save(self._state)

    def close(self, ended: JobView | None = None) -> None:  # noqa: ARG002 - files have no end
        if self._writer is not None:
            self._writer.close()
