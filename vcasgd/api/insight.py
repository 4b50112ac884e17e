"""What a job did in detail, as the API shows it. Times are Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vcasgd.store.ledger.job import JobRecord

#: a count of the histogram holds all that is as stale as this, or more
MOST_STALENESS = 32


class StalenessBucket(BaseModel):
    """How many updates were so stale; the last one holds all that were staler, too."""

    staleness: int
    updates: int


class StalenessView(BaseModel):
    """Staleness of all updates of a job: a histogram without gaps, mean and maximum."""

    buckets: list[StalenessBucket]
    mean: float
    max: int

    @classmethod
    def of(cls, job: JobRecord) -> StalenessView:
        counts = {int(key): int(n) for key, n in job.totals.get("staleness", {}).items()}
        buckets = [
            StalenessBucket(staleness=each, updates=counts.get(each, 0))
            for each in range(max(counts, default=-1) + 1)
        ]
        return cls(
            buckets=buckets,
            mean=float(job.totals.get("staleness_mean", 0.0)),
            max=int(job.totals.get("staleness_max", 0)),
        )


class SpanView(BaseModel):
    """`to` is `null` while it lasts."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    state: Literal["booting", "running", "notice", "draining", "dead"]
    since: float = Field(alias="from")
    until: float | None = Field(alias="to")


class MachineView(BaseModel):
    """What a machine did for the job, one span after the other. `lost`: not by our wish;
    `reason`: why it is gone, or will be; `replaced_by`: the machine that took its place."""

    instance: str
    pool: str
    zone: str
    instance_type: str
    spot: bool
    price_per_hour: float
    replaced_by: str | None
    spans: list[SpanView]
    reason: str | None
    lost: bool

    @classmethod
    def of(cls, instance: str, lane: Mapping[str, Any], job: JobRecord) -> MachineView:
        view = cls.model_validate({**lane, "instance": instance})
        # nobody writes what machines do after the end of their job
        if job.ended_at is not None and view.spans:
            last = view.spans[-1]
            if last.until is None and last.state != "dead":
                last.until = max(last.since, job.ended_at)
        return view


class SubtasksView(BaseModel):
    """Where the subtasks of an epoch stand. `epoch` counts from 1, `first` is the number of its
    first subtask, `total` how many it has; `states` has a letter for each, up to the limit: `o`
    open, `l` leased, `r` leased again after somebody lost it, `p` applied in part, `a` applied."""

    epoch: int
    first: int
    total: int
    states: str
