"""A job, as the API shows it. Times are Unix seconds."""

from __future__ import annotations

from math import isfinite, nan
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.job import JobRecord, JobState


class ProgressView(BaseModel):
    """How far a job is. `samples_expected` is unknown until the data was looked at;
    `samples_lost` is only told of a job that went through all its epochs."""

    epochs: int
    finished_epochs: int
    subtasks_total: int
    samples_expected: int | None
    samples_applied: int
    samples_repeated: int
    samples_lost: int | None
    fraction: float = Field(ge=0, le=1)

    @classmethod
    def of(cls, job: JobRecord) -> ProgressView:
        expected = job.facts.samples * job.spec.epochs if job.facts else None
        applied = int(job.totals.get("applied", 0))
        # a job that was stopped early left samples out; it lost none
        whole = job.state.over and job.finished_epochs >= job.spec.epochs
        return cls(
            epochs=job.spec.epochs,
            finished_epochs=job.finished_epochs,
            subtasks_total=job.spec.total_subtasks,
            samples_expected=expected,
            samples_applied=applied,
            samples_repeated=int(job.totals.get("repeated", 0)),
            samples_lost=expected - applied if expected is not None and whole else None,
            fraction=min(1.0, applied / expected) if expected else 0.0,
        )


class TotalsView(BaseModel):
    """Sums over all updates of a job; `rejected` counts by reason."""

    updates: int = 0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    rejected: dict[str, int] = {}


class EvaluationView(BaseModel):
    """The result of one evaluation on the validation split."""

    model_config = ConfigDict(from_attributes=True)

    epoch: int
    version: int
    metrics: dict[str, float | None]
    worker: str
    seconds: float
    at: float


class BestView(BaseModel):
    """The best epoch of a job by the metric that ranks its epochs."""

    epoch: int
    metric: str
    mode: Literal["min", "max"]
    value: float

    @classmethod
    def of(cls, job: JobRecord) -> BestView | None:
        """Return None while no evaluation has a finite value of a known metric."""
        best, metric = job.best, job.metric
        value = best.metrics.get(metric.name, nan) if best and metric else nan
        if best is None or metric is None or not isfinite(value):
            return None
        return cls(epoch=best.epoch, metric=metric.name, mode=metric.mode, value=value)


class TunedView(BaseModel):
    """What was found by measuring the job, as far as its part `tuning` asks for it. `shares`: of
    the push interval, by worker; `implicit_momentum`: that asynchrony adds, and by which that of
    the optimizers is lowered; `mixing`: by what the weight of updates is multiplied; `learners`:
    by machine."""

    model_config = ConfigDict(from_attributes=True)

    shares: dict[str, float] = {}
    implicit_momentum: float = 0.0
    mixing: float = 1.0
    learners: dict[str, int] = {}


class JobView(BaseModel):
    """A job. `version` is how many updates its model contains, `model` the checkpoint that
    holds the finished model; `evictions` and `kills` count machines that it lost; `store_nodes`
    is how many its model is cut over, `null` before the first snapshot; `request` is the id of the
    request that submitted it."""

    id: str
    name: str
    state: JobState
    reason: str | None
    traceback: str | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    spec: JobSpec
    progress: ProgressView
    totals: TotalsView
    evaluations: list[EvaluationView]
    best_accuracy: float | None
    best: BestView | None
    version: int
    model: str | None
    package: str
    request: str | None
    evictions: int
    kills: int
    tuned: TunedView
    store_nodes: int | None

    @classmethod
    def of(cls, job: JobRecord) -> JobView:
        return cls(
            id=job.id,
            name=job.spec.name,
            state=job.state,
            reason=job.reason,
            traceback=job.traceback,
            created_at=job.created_at,
            started_at=job.started_at,
            ended_at=job.ended_at,
            spec=job.spec,
            progress=ProgressView.of(job),
            totals=TotalsView.model_validate(job.totals),
            evaluations=[EvaluationView.model_validate(each) for each in job.evaluations],
            best_accuracy=max(
                (
                    accuracy
                    for each in job.evaluations
                    if isfinite(accuracy := each.metrics.get("accuracy", nan))
                ),
                default=None,
            ),
            best=BestView.of(job),
            version=job.version,
            model=job.model,
            package=job.package,
            request=job.request,
            evictions=job.evictions,
            kills=job.kills,
            tuned=TunedView.model_validate(job.tuned),
            store_nodes=job.facts.shards if job.facts else None,
        )
