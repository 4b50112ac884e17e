"""Entries of the API's listings. Times are Unix seconds.

Their writers are other processes, possibly of another version: what they add travels
through, and what is missing is null.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


def finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: a metric of a diverged model is null."""
    match value:
        case dict():
            return {name: finite(each) for name, each in value.items()}
        case list():
            return [finite(each) for each in value]
        case float() if not math.isfinite(value):
            return None
    return value


class _Row(BaseModel):
    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _as_json(cls, value: Any) -> Any:
        return finite(value)


class EventRow(_Row):
    """Something that happened to a job. `kind` is short and stable, `text` for people; `request`:
    the one that brought it about, else the one that submitted the job."""

    id: str
    at: float
    kind: str
    text: str
    details: dict[str, Any] = {}
    request: str | None = None


class LogRow(_Row):
    """A line that a worker printed."""

    id: str
    at: float
    worker: str
    line: str


class MetricRow(_Row):
    """A point of the totals over time; rates and means are since the point before.
    `implicit_momentum`: that asynchrony adds, as staleness says; `mixing_factor`: by which the
    weight of updates was multiplied; `waiting`: for the parameter server; `spent_usd`: as far as
    it was booked; `accuracy` and `validation`: of the newest evaluation then."""

    id: str
    at: float
    version: int | None = None
    updates: int | None = None
    samples: int | None = None
    finished_epochs: int | None = None
    updates_per_second: float | None = None
    samples_per_second: float | None = None
    loss: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    implicit_momentum: float | None = None
    mixing_factor: float | None = None
    rejected: int | None = None
    waiting: int | None = None
    workers: int | None = None
    spent_usd: float | None = None
    accuracy: float | None = None
    validation: dict[str, float | None] | None = None


class WorkerRow(_Row):
    """A worker's last heartbeat. `quarantined`: why it gets no more work; `step_seconds`, and
    `local_steps` and `momentum`: of its last push intervals, and in the last one."""

    name: str
    job: str
    quarantined: str | None = None
    at: float | None = None
    instance: str | None = None
    host: str | None = None
    pid: int | None = None
    doing: str | None = None
    steps: int | None = None
    samples: int | None = None
    step_seconds: float | None = None
    local_steps: int | None = None
    momentum: float | None = None
    version: int | None = None
    pushes: int | None = None
    pushed_bytes: int | None = None
    pushed_again: int | None = None
    discarded: int | None = None
    unapplied: int | None = None
    resident_bytes: int | None = None
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    gpu_memory_free_bytes: int | None = None
    cores: int | None = None
    notice: str | None = None
    notice_at: float | None = None
    leaving: str | None = None


class CheckpointRow(_Row):
    """A checkpoint in the object storage. `digest` is its SHA-256, `size` in bytes."""

    name: str
    version: int
    digest: str
    size: int
    at: float | None = None
    finished_epochs: int | None = None
    samples: int | None = None


class InstanceRow(_Row):
    """A machine, as the controller saw it last. `joined`: it is part of the cluster; `job`: the
    one that it works for."""

    id: str
    pool: str | None = None
    state: str | None = None
    joined: bool | None = None
    job: str | None = None
    launched_at: float | None = None
    notice_at: float | None = None
    host: str | None = None
    price_per_hour: float | None = None
    on_demand_price_per_hour: float | None = None
    spot: bool | None = None
    zone: str | None = None
    instance_type: str | None = None
    advised_at: float | None = None


class PoolRow(_Row):
    """A place to buy machines, as the controller saw it last. `reason`: why it, or which part of
    it, is left alone; `labels`: of the data that it may see; `offers` and `markets`: what it sells
    in which zone, and how it answered; `idle`: of its `instances`, those without work."""

    name: str
    instances: int | None = None
    idle: int | None = None
    launches: int | None = None
    blocked_until: float | None = None
    reason: str | None = None
    provider: str | None = None
    spot: bool | None = None
    capacity: int | None = None
    labels: list[str] = []
    max_price_per_hour: float | None = None
    offers: list[dict[str, Any]] | None = None
    markets: list[dict[str, Any]] = []


class ServerRow(_Row):
    """A parameter server's last heartbeat. `versions`: of the jobs that it serves.
    `unreplicated`: since when the `ledger` or its `tensors` server is without its replicas."""

    node: str
    at: float | None = None
    pid: int | None = None
    token: int | None = None
    versions: dict[str, int] = {}
    unreplicated: dict[str, float] = {}


class StatusView(BaseModel):
    """The platform as a whole. `controller`: whether one is at work."""

    version: str
    cluster: str
    controller: bool
    active_jobs: list[str]
    servers: int
    instances: int
    workers: int


class Eviction(BaseModel):
    """How a machine is to be taken: with a notice of so many seconds, or with none at all.
    Without a body: with the notice that is usual in its cloud."""

    model_config = ConfigDict(extra="forbid")

    notice_seconds: float | None = Field(default=None, ge=0, le=3600)
    kill: bool = False


class EvictionRequested(BaseModel):
    """What was asked of the controller; it is done once, soon."""

    kind: Literal["evict"] = "evict"
    instance: str
    notice_seconds: float | None
    kill: bool


class Package(BaseModel):
    """A package that is stored."""

    digest: str
    size: int


class Health(BaseModel):
    """`reasons`: what keeps the API from serving requests."""

    status: Literal["ok", "unavailable"]
    reasons: list[str] = []
