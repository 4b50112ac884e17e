"""History of a job: events, log lines, metrics, checkpoints, machines, and subtasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field

from vcasgd.schemas.base import Row, Schema

#: Kinds of events, and what each one says.
EVENTS = {
    "submitted": "the job was accepted",
    "job-running": "training started or continued",
    "job-paused": "the job was paused, with the reason",
    "job-finishing": "everything is applied; the last model is evaluated and stored",
    "job-succeeded": "the job ended with a model",
    "job-failed": "the job failed, with the reason",
    "job-cancelled": "a user cancelled the job",
    "job-quarantined": "the job failed because a worker wrote what can't be read, or too much; the "
    "reason names the field: a worker of another version, or a hostile one",
    "changed": "priority or weight changed",
    "estimate": "time and memory that the job needs, by its first steps",
    "evaluated": "metrics of an evaluated model",
    "checkpoint": "a checkpoint was written",
    "checkpoint-failed": "writing a checkpoint failed; it is retried",
    "checkpoint-damaged": "a digest did not match; the previous checkpoint is used",
    "restored": "no server had the model in memory, so the job went back to a checkpoint; the "
    "event names what is trained again",
    "restarted": "no server had the model in memory and there was no checkpoint, so the job "
    "started again",
    "republished": "the tensors server restarted empty, or older, and was filled from memory",
    "rounded": "a parameter server took over without the last bits of the last version",
    "rolled-back": "training diverged and went back to the best model or, with an owner, to before "
    "a volunteer's wrong work",
    "not-rolled-back": "no checkpoint exists to undo a volunteer's wrong work",
    "unreplicated": "no replica of the tensors server answers; updates continue without one",
    "replicated": "the tensors server has its replica again",
    "store-nodes-missing": "the model needs more store nodes than are configured; the job waits",
    "server-failing": "a parameter server fails again and again at this job, with the last error; "
    "it tries again every 30 s",
    "store-full": "a tensors server is at its memory limit, and the job's updates wait",
    "worker-started": "a worker started",
    "worker-evicted": "a machine was lost after a notice",
    "worker-killed": "a machine was lost without a notice",
    "worker-left": "a machine that joined left as its owner wanted; it handed in its work, and "
    "counts as no loss",
    "worker-crashed": "a worker's process ended, and its machine still lives; if there are many, "
    "memory may be short",
    "worker-quarantined": "a worker gets no more work: too many invalid updates, or its machine "
    "has other data or another model",
    "eviction-notice": "a machine received a notice; its replacement is ordered",
    "rebalance-advice": "the cloud recommends leaving a machine; a replacement is ordered",
    "not-handed-in": "the stack ended without waiting longer for some workers",
    "stack-stopped": "`vcasgd down` ended the stack and its machines",
    "machine-given": "a machine was taken from the job for another one, with the reason",
    "machine-received": "the job received a machine of another one, with the reason",
    "machine-unreachable": "a machine of a removed pool may still run and cost money",
    "machines-limited": "the limit of the user gives the job fewer machines than it could use",
    "boot-failed": "a machine failed to boot, with the reason",
    "pool-refused": "a pool may not see the job's data, with the reason",
    "lease-refused": "a worker may not see the job's data, with the reason",
    "update-rejected": "a worker sent an invalid update, with the reason",
    "slow-link": "a worker needs longer to push an update than to train for it: use a smaller "
    "update.codec or a longer push_every",
    "bad-sample": "a sample is skipped, with its index and error",
    "batch-undivided": "whole batches are trained by one worker, with the reason",
    "batch-exceeds-data": "the batch is larger than the training set",
    "batches-mixed": "a step has parts of several batches, or samples that are alike",
    "batch-weights": "what the parts of a batch are weighted by",
    "buffers-averaged": "buffers whose first batches did not show how to merge them are averaged",
    "clip-approximated": "gradients are clipped by the norm of a part of the batch",
    "loop-clips": "the loop or a hook changes the gradients of a part of the batch",
    "code-not-run": "code after the loop of a script, which doesn't run in a job",
    "codec-chosen": "updates travel in a lossy encoding, because the first worker's link is slow",
    "float64-rounded": "a large model in float64 travels as float32",
    "gpus-chosen": "whether the GPUs of a machine train as one worker or as one each, with the "
    "reason",
    "hooks-on-workers": "what hooks and callbacks keep is each worker's own",
    "steps-in-turn": "gradients follow a worker's own step of another optimizer",
    "momentum-starts-again": "a new worker starts without the momentum of SGD",
    "norm-of-parts": "a layer normalizes over a worker's part of the batch",
    "optimizer-uncorrected": "the optimizer's moments are those of a part of the batch",
    "own-data": "the loop calls methods of the data set that each worker may follow differently",
    "own-values": "each worker has its own values of what the code changes from batch to batch",
    "several-ranks": "a worker trains each batch with several processes",
    "state-beside": "state beside the model that travels with it",
    "state-starts-again": "a new worker starts with an empty state of this optimizer",
    "tuned-learners": "automatic tuning of learners per machine, with the measurement",
    "tuned-local-steps": "automatic tuning of local steps, with the measurement",
    "tuned-mixing": "automatic tuning of the weight of updates, with the measurement",
    "tuned-momentum": "automatic tuning of the momentum, with the measurement",
    "owner-quarantined": "what a volunteer's machines sent is wrong; they get no more work",
    "repetition-failed": "a repeated update differs from the volunteer's",
    "repetitions-off": "no updates are repeated, with the reason",
    "repetitions-unclear": "neither of two repetitions of an update is right",
    "tracker-failed": "the export to a tracker failed twice in a row; it is retried",
    "exec": "an administrator ran a command or a shell beside a worker",
}


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
    """Return the checkpoint of a name, a version, ``best``, or ``last``.

    By default, it is the best one, else the last one. None if there is no such checkpoint.
    """
    if name is None:
        return chosen(rows, BEST) or chosen(rows, LAST)
    return next(
        (row for row in reversed(rows) if name in (row.name, str(row.version))
         or (name == BEST and row.best) or (name == LAST and row.last)),
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


#: Phase of a machine. ``notice``: its cloud is about to take it. ``draining``: the controller asked
#: its worker to leave, or its owner the machine. ``dead``: it no longer exists.
MachinePhase = Literal["booting", "running", "notice", "draining", "dead"]


class SpanView(Schema):
    """A period in which a machine had one state."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    state: MachinePhase
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
    replaced_by: str | None = Field(default=None, description="Machine that replaced this one.")
    spans: list[SpanView] = Field(default=[])
    reason: str | None = Field(
        default=None, description="Reason for the machine's end, once it is known."
    )
    lost: bool = Field(
        default=False, description="True if the cloud took the machine, or it failed."
    )
    given_to: str | None = Field(default=None, description="Job that the machine went to.")

    @property
    def phase(self) -> MachinePhase | None:
        """The present phase; None if the machine no longer does anything for the job."""
        return self.spans[-1].state if self.spans and self.spans[-1].until is None else None


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
