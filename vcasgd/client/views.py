"""What the API answers, as values. Fields that a newer API adds are passed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from html import escape
from typing import Any, Self, TypeVar

#: a worker, an instance, a pool, a checkpoint: as the API shows it
Row = dict[str, Any]

_OVER = frozenset({"succeeded", "failed", "cancelled"})

View = TypeVar("View")


def from_row(kind: type[View], row: Mapping[str, Any]) -> View:
    """A dataclass from those of its fields that the row has."""
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in row.items() if name in names})


@dataclass(frozen=True)
class Event:
    """Something that happened to a job. ``kind`` is short and stable, ``text`` for people."""

    id: str
    at: float
    kind: str
    text: str
    details: dict[str, Any]
    #: that brought it about, else that submitted the job
    request: str | None = None


@dataclass(frozen=True)
class LogLine:
    """A line that a worker printed."""

    id: str
    at: float
    worker: str
    line: str


@dataclass(frozen=True)
class Progress:
    """How far a job is. ``None``: not known yet.

    ``samples_lost`` is only told of a job that went through all its epochs; anything but 0
    is a fault of the platform.
    """

    epochs: int
    finished_epochs: int
    subtasks_total: int
    samples_expected: int | None
    samples_applied: int
    samples_repeated: int
    samples_lost: int | None
    fraction: float


@dataclass(frozen=True)
class Totals:
    """Sums over all updates of a job; ``rejected`` counts by reason."""

    updates: int
    staleness_mean: float
    staleness_max: int
    rejected: dict[str, int]


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation on the validation split."""

    epoch: int
    version: int
    metrics: dict[str, float | None]
    worker: str
    seconds: float
    at: float


@dataclass(frozen=True)
class JobView:
    """A job. Times are Unix seconds."""

    id: str
    name: str
    state: str
    reason: str | None
    traceback: str | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    spec: dict[str, Any]
    progress: Progress
    totals: Totals
    evaluations: tuple[Evaluation, ...]
    best_accuracy: float | None
    version: int
    model: str | None
    package: str
    evictions: int
    kills: int
    #: over which the model is cut; None before the first snapshot
    store_nodes: int | None
    #: that submitted it, as the log lines about it name it
    request: str | None = None
    #: what was found by measuring it: shares, implicit_momentum, mixing, learners
    tuned: dict[str, Any] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.state in _OVER

    def to_dict(self) -> dict[str, Any]:
        """As the API's JSON has it."""
        return asdict(self)

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        known = {
            "state": f"{self.state}: {self.reason}" if self.reason else self.state,
            "epoch": f"{self.progress.finished_epochs} of {self.progress.epochs} done",
            "progress": f"{self.progress.fraction:.0%}",
            "best accuracy": "" if self.best_accuracy is None else f"{self.best_accuracy:.2%}",
            "updates": f"{self.totals.updates}, mean staleness {self.totals.staleness_mean:.1f}",
            "machines lost": f"{self.evictions} evicted, {self.kills} killed",
        }
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
            for name, value in known.items()
        )
        return f"<table><caption>{escape(self.id)}</caption>{rows}</table>"

    @classmethod
    def from_json(cls, row: Mapping[str, Any], **more: Any) -> Self:
        """``more``: fields that a subclass has beside those of the API."""
        evaluations = tuple(from_row(Evaluation, each) for each in row["evaluations"])
        parts = {
            "progress": from_row(Progress, row["progress"]),
            "totals": from_row(Totals, row["totals"]),
            "evaluations": evaluations,
        }
        return from_row(cls, {**row, **parts, **more})
