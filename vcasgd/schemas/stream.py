"""Entries of the event stream of the whole platform."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vcasgd.schemas.base import Schema
from vcasgd.schemas.fleet import MachineRow
from vcasgd.schemas.history import EventRow
from vcasgd.spec.job import JobState


class JobBrief(Schema):
    """The numbers of a job that change while it runs, as the overview shows them."""

    id: str
    name: str
    owner: str | None = Field(default=None, description="User who submitted it.")
    created_at: float
    ended_at: float | None
    state: JobState
    waiting: str | None = Field(
        default=None, description="Why the job has fewer machines than it could use."
    )
    finished_epochs: int
    fraction: float
    version: int
    updates: int
    accuracy: float | None = Field(description="From the newest evaluation.")
    best_accuracy: float | None
    workers: int
    max_workers: int = Field(description="Workers that the job may have.")
    evictions: int
    kills: int
    spent_usd: float
    on_demand_usd: float = Field(description="Cost of the same machines on demand.")


class MachinesBrief(Schema):
    """Changes of machines. Without `changed` and `removed`, there are none."""

    whole: bool = Field(description="True if no other machines are left.")
    changed: list[MachineRow]
    removed: list[str]


class FleetBrief(Schema):
    """Sums over all machines."""

    controller: bool = Field(description="True if a controller is running.")
    machines: int
    joined: int = Field(description="Machines that are part of the cluster.")
    blocked: dict[str, str] = Field(description="Reasons of pools that are backing off.")
    usd_per_hour: float


class NodeBrief(Schema):
    """State of a store node, by job."""

    versions: dict[str, int] = Field(default={})
    queued: dict[str, int] = Field(default={})
    unreplicated: dict[str, float] = Field(default={})


class StoreBrief(Schema):
    """State of all store nodes."""

    nodes: dict[str, NodeBrief]
    ledger_full: bool = Field(description="True if the ledger accepts no new jobs.")


class JobEventRow(EventRow):
    """An event with the job that it belongs to."""

    job: str


class StreamMessage(Schema):
    """An entry of the stream: a new state of a part of the platform, or an event."""

    id: str = Field(description="Position in the stream; pass it as `after` to resume there.")
    type: Literal["job", "fleet", "machines", "store", "event"]
    data: JobBrief | FleetBrief | MachinesBrief | StoreBrief | JobEventRow
