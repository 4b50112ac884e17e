"""Jobs, and the requests that create and change them."""

from __future__ import annotations

import time
from html import escape
from typing import Annotated, Literal

from pydantic import Field, PlainValidator, SecretStr

from vcasgd.limits import MAX_TEXT
from vcasgd.schemas.base import ReportedSpec, RequestBody, Schema
from vcasgd.spec.environment import MAX_VALUE_LENGTH, MAX_VARIABLES
from vcasgd.spec.job import JobSpec, JobState, Priority, Weight
from vcasgd.spec.sections import metric_text, place_of
from vcasgd.spec.values import DIGEST_PATTERN

SecretValue = Annotated[SecretStr, Field(min_length=1, max_length=MAX_VALUE_LENGTH)]
#: A specification in a request; its errors are those of a job file, not pydantic's.
SubmittedSpec = Annotated[JobSpec, PlainValidator(JobSpec.parse, json_schema_input_type=JobSpec)]


class ProgressView(Schema):
    """Progress of a job.

    `epochs`, `subtasks_total`, and `samples_expected` are null until a worker has read the data,
    unless the job sets them. The last epoch may be cut short. `samples_skipped` are bad samples
    that weren't trained, which `samples_applied` doesn't contain. `samples_lost` is null until the
    job has finished all epochs; then any value but 0 is a fault of the platform.
    """

    epochs: int | None
    finished_epochs: int
    subtasks_total: int | None
    samples_expected: int | None
    samples_applied: int
    samples_skipped: int = 0
    samples_repeated: int
    samples_lost: int | None
    fraction: float = Field(ge=0, le=1)

    @property
    def epochs_text(self) -> str:
        """Number of epochs, or a question mark while it is unknown."""
        return "?" if self.epochs is None else str(self.epochs)


class TotalsView(Schema):
    """Sums over all updates of a job. `rejected` counts rejected updates by reason."""

    updates: int = 0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    rejected: dict[str, int] = Field(default={})


class TrafficView(Schema):
    """Bytes that all workers of a job have moved so far, as they are encoded on the network.

    Those of the last second before a worker is lost are missing.
    """

    pushed_bytes: int = Field(default=0, description="Bytes of pushed updates.")
    fetched_bytes: int = Field(default=0, description="Bytes of fetched snapshots.")


class EvaluatedModel(Schema):
    """The place of an evaluated model in its job.

    `epoch` is the finished epoch if the job evaluates each epoch, else the samples in epochs.
    `samples` and `step` are those in the model, null if they are unknown.
    """

    epoch: float
    samples: int | None = None
    step: int | None = None

    @property
    def place(self) -> str:
        """The place in the job, such as ``epoch 3``, or ``epoch 2.47, step 1200``."""
        return place_of(self.epoch, self.step)


class EvaluationView(EvaluatedModel):
    """Result of one evaluation on the validation split."""

    version: int
    metrics: dict[str, float | None]
    worker: str
    seconds: float
    at: float


class BestView(EvaluatedModel):
    """Best evaluated model of a job, by the metric that ranks them."""

    metric: str
    mode: Literal["min", "max"]
    value: float

    def __str__(self) -> str:
        return f"{metric_text(self.metric, self.value)} in {self.place}"


class TunedView(Schema):
    """Values that the platform tuned while the job trained, as far as `tuning` enables it, or
    because training diverged."""

    shares: dict[str, float] = Field(
        default={}, description="Fraction of the push interval, by worker."
    )
    implicit_momentum: float = Field(
        default=0.0,
        description="Momentum that asynchrony adds; the optimizers' own is lowered by it.",
    )
    mixing: float = Field(default=1.0, description="Factor of the weight of each update.")
    learners: dict[str, int] = Field(default={}, description="Learners by machine.")
    rollbacks: int = Field(
        default=0, description="Times that training diverged and went back to its best model."
    )
    learning_rate: float = Field(
        default=1.0, description="Factor of the learning rate, which each rollback halves."
    )


class QueueView(Schema):
    """Place of a job among those that wait for machines, from 1, and the number of those jobs."""

    position: int
    length: int


class JobRow(Schema):
    """Row of a job in the overview, and part of its own view. Times are Unix seconds."""

    id: str
    name: str
    owner: str | None = Field(
        default=None, description="User who submitted it: the name of an API token."
    )
    created_at: float
    ended_at: float | None
    state: JobState
    status: str = Field(
        default="", description="The state, or `queued` while a starting job has no machine."
    )
    reason: str | None = Field(default=None, description="Why the job is in its state.")
    waiting: str | None = Field(
        default=None,
        description="Why the job has fewer machines than it could use, or that they boot.",
    )
    queue: QueueView | None = Field(
        default=None, description="null if it doesn't wait for a machine that others have."
    )
    version: int = Field(description="Number of updates in the model.")
    best: BestView | None = Field(
        default=None, description="null while no evaluation has a value of the ranking metric."
    )
    evictions: int = Field(description="Machines lost with a notice.")
    kills: int = Field(description="Machines lost without a notice.")


class JobView(JobRow):
    """A job."""

    deadline: float | None = Field(default=None, description="When it has to end.")
    outlook: str | None = Field(
        default=None, description="How it stands before its deadline, as of the controller."
    )
    notes: list[str] = Field(
        default=[], description="What the job does otherwise than one process would."
    )
    warnings: list[str] = Field(
        default=[], description="Those of the notes that its user may want to act on."
    )
    traceback: str | None
    started_at: float | None
    spec: ReportedSpec
    progress: ProgressView
    totals: TotalsView
    traffic: TrafficView = TrafficView()
    evaluations: list[EvaluationView]
    loss: float | None = Field(
        default=None, description="Mean training loss of the newest updates; null before them."
    )
    model: str | None = Field(description="Checkpoint that holds the finished model.")
    package: str
    request: str | None = Field(
        default=None, description="ID of the request that submitted the job."
    )
    tuned: TunedView = TunedView()
    store_nodes: int | None = Field(
        default=None,
        description="Number of store nodes that hold the model; null before the first snapshot.",
    )

    @property
    def over(self) -> bool:
        """True if the job has ended."""
        return self.state.over

    @property
    def seconds(self) -> float:
        """Time from the start, or from the submission before it, to the end or until now."""
        return (self.ended_at or time.time()) - (self.started_at or self.created_at)

    @property
    def newest_metrics(self) -> dict[str, float | None]:
        """Metrics of the newest evaluation without its ``count``, the one that ranks the models
        first."""
        if not self.evaluations:
            return {}
        metrics = self.evaluations[-1].metrics
        first = self.best.metric if self.best else None
        ranked = sorted(metrics, key=lambda name: name != first)
        return {name: metrics[name] for name in ranked if name != "count"}

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 1."""
        current = self.progress.finished_epochs + 1
        return current if self.progress.epochs is None else min(current, self.progress.epochs)

    def _repr_html_(self) -> str:
        """Return the job as an HTML table, for notebooks."""
        facts = {
            "state": f"{self.state}: {self.reason}" if self.reason else self.state,
            "machines": self.waiting or "",
            "deadline": self.outlook or "",
            "notes": "; ".join(self.notes),
            "epoch": f"{self.progress.finished_epochs} of {self.progress.epochs_text} done",
            "progress": f"{self.progress.fraction:.0%}",
            "best": "" if self.best is None else str(self.best),
            "updates": f"{self.totals.updates}, mean staleness {self.totals.staleness_mean:.1f}",
            "machines lost": f"{self.evictions} evicted, {self.kills} killed",
        }
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
            for name, value in facts.items()
        )
        return f"<table><caption>{escape(self.id)}</caption>{rows}</table>"


# -- requests -----------------------------------------------------------------------------------


class SubmitRequest(RequestBody):
    """A job, and the digest of the package that holds its code."""

    spec: SubmittedSpec
    package: str = Field(pattern=DIGEST_PATTERN, description="SHA-256 of an uploaded package.")
    secrets: dict[str, SecretValue] | None = Field(
        default=None,
        max_length=MAX_VARIABLES,
        description="The values of the specification's `secrets`. No response contains them.",
    )


class ResumeRequest(RequestBody):
    """Options for resuming a job."""

    max_cost_usd: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="New budget for the whole job. Without it, the job keeps its budget.",
    )


class ChangeRequest(RequestBody):
    """New values of the fields of a job that can change before it ends."""

    priority: Priority | None = None
    weight: Weight | None = None


# -- job files ----------------------------------------------------------------------------------


class JobText(RequestBody):
    """Text of a job file."""

    yaml: str = Field(max_length=MAX_TEXT)


class Mistake(Schema):
    """An error or a warning about a field of a job file."""

    path: str = Field(description="Path of the field, joined by dots; empty for the whole file.")
    message: str
    remedy: str | None = None
    line: int | None = Field(default=None, description="Line number from 1, if known.")


class Validation(Schema):
    """Result of checking a job file."""

    valid: bool
    errors: list[Mistake]
    warnings: list[Mistake] = Field(
        description="Settings that are valid, but known to train badly."
    )
    spec: ReportedSpec | None = Field(
        description="The job with all defaults filled in; null if the file is invalid."
    )
