"""History of a job: events, log lines, metrics, checkpoints, machines, and subtasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field

from vcasgd.schemas.base import Row, Schema


class EventRow(Row):
    """An event of a job. `kind` is short and stable; `text` is for people."""

    id: str
    at: float
    kind: str
    text: str
    details: dict[str, Any] = Field(default={})
    request: str | None = Field(
        default=None,
        description="ID of the request that caused the event, or that submitted the job.",
    )


class LogRow(Row):
    """A line that a worker printed or logged."""

    id: str
    at: float
    worker: str
    level: Literal["out", "err", "debug", "info", "warning", "error"] = Field(
        default="out",
        description="Level of a record of Python's logging; `out` and `err` are the streams.",
    )
    line: str


class MetricRow(Row):
    """A point of the metrics over time. Rates and means cover the time since the previous point."""

    # with `names`, the API sends only the fields that the client asks for
    model_config = ConfigDict(json_schema_serialization_defaults_required=False)

    id: str
    at: float
    version: int | None = None
    updates: int | None = None
    samples: int | None = None
    finished_epochs: int | None = None
    updates_per_second: float | None = None
    samples_per_second: float | None = None
    loss: float | None = None
    logged: dict[str, float | None] | None = Field(
        default=None, description="Means of the values that steps logged with `vcasgd.log`."
    )
    staleness_mean: float | None = None
    staleness_max: int | None = None
    implicit_momentum: float | None = Field(
        default=None, description="Momentum that asynchrony adds, estimated from the staleness."
    )
    mixing_factor: float | None = Field(
        default=None, description="Factor of the weight of each update."
    )
    rejected: int | None = None
    waiting: int | None = Field(
        default=None, description="Updates that wait for the parameter server."
    )
    workers: int | None = None
    spent_usd: float | None = Field(default=None, description="Cost that is booked so far.")
    accuracy: float | None = Field(default=None, description="From the newest evaluation.")
    validation: dict[str, float | None] | None = Field(
        default=None, description="All metrics of the newest evaluation."
    )


class CheckpointRow(Row):
    """A checkpoint in the object storage. `digest` is its SHA-256; `size` is in bytes."""

    name: str
    version: int
    digest: str
    size: int
    at: float | None = None
    finished_epochs: int | None = None
    samples: int | None = None
    place: str | None = Field(
        default=None, description="Place of its evaluation, such as `epoch 3`; null without one."
    )
    metrics: dict[str, float | None] | None = Field(
        default=None, description="Result of its evaluation; null without one."
    )
    best: bool = Field(
        default=False, description="True for the best evaluated model, if a metric ranks them."
    )
    last: bool = Field(
        default=False,
        description="True for the model that the job ended with, or the newest one so far.",
    )


#: Names that stand for the best model and for the last one of a job.
BEST, LAST = "best", "last"


def chosen(rows: Sequence[CheckpointRow], name: str | None) -> CheckpointRow | None:
    """Return the checkpoint of a name, ``best``, or ``last``; by default the best, else the last.

    None if there is no such checkpoint.
    """
    if name is None:
        return chosen(rows, BEST) or chosen(rows, LAST)
    return next(
        (row for row in rows if name == row.name or (name == BEST and row.best)
         or (name == LAST and row.last)),
        None,
    )  # fmt: skip


class StalenessBucket(Schema):
    """Number of updates with one staleness. The last bucket also counts all larger values."""

    staleness: int
    updates: int


class StalenessView(Schema):
    """Staleness of all updates of a job: a histogram without gaps, mean, and maximum."""

    buckets: list[StalenessBucket]
    mean: float
    max: int


class SpanView(Schema):
    """A period in which a machine had one state."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    state: Literal["booting", "running", "notice", "draining", "dead"]
    since: float = Field(alias="from")
    until: float | None = Field(alias="to", description="null for the current state.")


class TimelineView(Schema):
    """A machine's work for a job, as consecutive spans."""

    machine: str
    pool: str
    zone: str
    machine_type: str
    spot: bool
    price_per_hour: float
    replaced_by: str | None = Field(description="Machine that replaced this one.")
    spans: list[SpanView]
    reason: str | None = Field(description="Reason for the machine's end, once it is known.")
    lost: bool = Field(description="True if the cloud took the machine, or it failed.")
    given_to: str | None = Field(default=None, description="Job that the machine went to.")


class SubtasksView(Schema):
    """State of the subtasks of an epoch."""

    epoch: int = Field(description="Number of the epoch, from 1.")
    first: int = Field(description="Number of its first subtask.")
    total: int = Field(description="Number of its subtasks.")
    per_letter: int = Field(description="Subtasks that a letter of `states` stands for.")
    states: str = Field(
        description="A letter for each subtask: `o` open, `l` leased, `r` leased again after a "
        "loss, `p` applied in part, `a` applied. If a letter stands for several subtasks, it is "
        "`r`, `l`, or `p` if one of them is, and `p` if only some of them are applied."
    )
    counts: dict[str, int] = Field(description="Number of subtasks by letter.")
