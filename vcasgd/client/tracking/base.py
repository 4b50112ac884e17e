"""The interface of trackers, and the position up to which a job was exported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from vcasgd.errors import SpecError
from vcasgd.schemas.jobs import JobView

#: Newest evaluations that a position names. Older ones count as exported.
EVALUATIONS_NAMED = 200


class Position(BaseModel):
    """The end of what a tracker has: the next export continues there."""

    model_config = ConfigDict(frozen=True)

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

    @classmethod
    def parse(cls, text: str | None, where: str) -> Position:
        """Return a stored position, or the start without one. Raises :class:`SpecError`."""
        if text is None:
            return cls()
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise SpecError(
                f"{where} is damaged: {error.errors()[0]['msg']}",
                remedy="delete it; the whole history is exported again then",
            ) from error

    @classmethod
    def load(cls, file: Path) -> Position:
        """Return the position in a file, or the start without one. Raises :class:`SpecError`."""
        return cls.parse(file.read_text() if file.exists() else None, str(file))

    def save(self, file: Path) -> None:
        """Replace the position in a file, which is never half written."""
        new = file.with_name(f".{file.name}")
        new.write_text(self.model_dump_json())
        new.replace(file)


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
