"""Machines, workers, pools, the servers of the store, and the stream of all their changes."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from vcasgd.printable import printable
from vcasgd.schemas.base import LARGEST_NUMBER, Count, Name, Number, RequestBody, Row, Schema
from vcasgd.schemas.history import EventRow
from vcasgd.schemas.jobs import JobRow
from vcasgd.spec.hardware import Hardware

#: Most counters of a data set, and most samples that a heartbeat names.
MAX_COUNTERS = 100
#: Characters of a text in a heartbeat; the rest is cut.
MAX_STATUS_LENGTH = 2000

Status = Annotated[
    str,
    BeforeValidator(lambda text: text[:MAX_STATUS_LENGTH] if isinstance(text, str) else text),
    AfterValidator(printable),
]
Counter = Annotated[int | float, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER, allow_inf_nan=False)]


class HeartbeatView(Schema):
    """Last heartbeat of a worker. `step_seconds`, `local_steps`, and `momentum` describe its last
    push intervals."""

    at: Number | None = None
    machine: Name | None = None
    host: Name | None = None
    pid: Count | None = None
    doing: Status | None = Field(default=None, description="Current activity.")
    steps: Count | None = Field(default=None, description="Local steps since the process started.")
    samples: Count | None = None
    samples_per_second: Number | None = Field(
        default=None, description="Rate over the last push intervals, waits included."
    )
    flops_utilization: Number | None = Field(
        default=None,
        description="Share of the GPU's peak in 16 bits that the model uses; null unless the task "
        "has `flops_per_sample` and the card is known.",
    )
    step_seconds: Number | None = None
    local_steps: Count | None = None
    momentum: Number | None = Field(default=None, description="null if it isn't tuned.")
    uncorrected: Name | None = Field(
        default=None,
        description="Name of the optimizer if its moments are those of a part of the batch.",
    )
    bad_samples: Annotated[dict[Name, Status], Field(max_length=MAX_COUNTERS)] | None = Field(
        default=None, description="Index and reason of the newest samples that it skipped."
    )
    unpushed_since: Number | None = Field(
        default=None, description="Start of the oldest training that isn't pushed yet."
    )
    version: Count | None = None
    pushes: Count | None = None
    push_seconds: Number | None = Field(default=None, description="Duration of the last push.")
    pushed_bytes: Count | None = Field(
        default=None, description="Bytes of pushed updates since the worker started."
    )
    fetched_bytes: Count | None = Field(
        default=None,
        description="Bytes of fetched snapshots since the worker started; null if an older "
        "worker doesn't report it.",
    )
    pushed_again: Count | None = None
    discarded: Count | None = None
    denied: Count | None = Field(
        default=None, description="Pushes that a store node refused, as the worker had no access."
    )
    unapplied: Count | None = None
    resident_bytes: Count | None = None
    memory_bytes: Count | None = None
    memory_free_bytes: Count | None = None
    gpu_memory_bytes: Count | None = None
    gpu_memory_free_bytes: Count | None = None
    gpu_utilization: Number | None = Field(
        default=None, description="Percentage of time in which the GPU computes, for any process."
    )
    device: Name | None = Field(default=None, description="GPU of this worker, or cpu.")
    visible_gpus: Annotated[str, Field(pattern=r"^[A-Za-z0-9,/_-]{1,400}$")] | None = Field(
        default=None, description="CUDA_VISIBLE_DEVICES of all its processes."
    )
    gpus: Count | None = Field(
        default=None, description="GPUs of the machine, each of which gets a worker."
    )
    ranks: Count | None = None
    cores: Count | None = None
    cpu_percent: Number | None = Field(
        default=None, description="Processor time since the heartbeat before; 100 is one core."
    )
    reading: Annotated[dict[Name, Counter], Field(max_length=MAX_COUNTERS)] | None = Field(
        default=None, description="Counters that the data set keeps of its reads."
    )
    notice: Name | None = Field(default=None, description="Kind of the notice of eviction.")
    notice_at: Number | None = None
    leaving: Status | None = Field(default=None, description="Reason why the worker leaves.")


class WorkerRow(HeartbeatView):
    """A worker and its last heartbeat. Unknown fields are kept."""

    model_config = ConfigDict(extra="allow")

    name: str
    job: str
    quarantined: str | None = Field(
        default=None, description="Reason for the quarantine; the worker gets no more work."
    )


class MachineState(StrEnum):
    """State of a machine. One that is ``waiting`` is in a queue of its cluster, and costs nothing
    yet. ``leaving`` has a notice and still runs; ``gone`` is final.
    """

    WAITING = "waiting"
    BOOTING = "booting"
    RUNNING = "running"
    LEAVING = "leaving"
    GONE = "gone"

    @property
    def stays(self) -> bool:
        """True without a notice or an end."""
        return self not in (MachineState.LEAVING, MachineState.GONE)


class Machine(Schema):
    """Machine, wherever it comes from: bought, ordered, or joined by itself.

    Its provider reports it, and the controller adds what it knows: the fields from `joined` on.
    Times are Unix seconds, prices USD per hour.
    """

    id: str
    pool: str
    state: MachineState
    launched_at: float
    notice_at: float | None = Field(
        default=None, description="Time at which the cloud takes it; null without a notice."
    )
    host: str = ""
    price_per_hour: float = Field(
        description="Current price; that of a spot machine changes while it runs."
    )
    spot: bool
    zone: str = ""
    machine_type: str = ""
    on_demand_price_per_hour: float = Field(
        default=0.0, description="On-demand price of this type in this zone."
    )
    advised_at: float | None = Field(
        default=None,
        description="Time since which the cloud recommends leaving it; it may run for long.",
    )
    leaves: bool = Field(
        default=False,
        description="True if it leaves as its owner wants: a planned end, and no loss.",
    )
    hardware: Hardware | None = Field(
        default=None,
        description="Hardware that it reported; null if that of its type's offers applies.",
    )
    joined: bool = Field(default=False, description="True if it is part of the cluster.")
    was_up: bool = Field(default=False, description="True if it ever was.")
    job: str | None = Field(default=None, description="Job that uses the machine.")
    pool_removed: bool = Field(
        default=False, description="True if its pool is not in the pools file any more."
    )
    ending: str | None = Field(
        default=None, description="Reason why the controller ends it, of a machine it ends."
    )
    problem: str | None = Field(
        default=None,
        description="Reason why it can't be ended, of a machine whose pool was removed. It may "
        "still run and cost money.",
    )


class PoolRow(Row):
    """A pool of machines, as the controller last observed it."""

    name: str
    machines: int | None = None
    idle: int | None = Field(default=None, description="Machines without work.")
    launches: int | None = None
    blocked_until: float | None = None
    reason: str | None = Field(
        default=None, description="Reason why the pool, or a part of it, is backing off."
    )
    provider: str | None = None
    kinds: str = Field(
        default="", description="Hardware that it sells or has; empty while it is unknown."
    )
    spot: bool | None = None
    capacity: int | None = None
    labels: list[str] = Field(default=[], description="Labels of data that the pool may process.")
    trust: Literal["own", "volunteer"] = Field(
        default="own", description="`volunteer`: updates of its machines are screened."
    )
    max_price_per_hour: float | None = None
    offers: list[dict[str, Any]] | None = Field(
        default=None, description="Machine types for sale, by zone."
    )
    markets: list[dict[str, Any]] = Field(
        default=[], description="Results of the last launches, by market."
    )


class StatusView(Schema):
    """State of the whole platform."""

    version: str
    cluster: str
    controller: bool = Field(description="True if a controller is running.")
    active_jobs: list[str]
    servers: int
    machines: int
    workers: int
    ledger_full: bool = Field(
        default=False, description="True near the ledger's memory limit: new jobs are refused."
    )


class Eviction(RequestBody):
    """Options for taking a machine. Without a body, it gets the usual notice of its cloud."""

    notice_seconds: float | None = Field(
        default=None, ge=0, le=3600, description="Seconds between the notice and the end."
    )
    kill: bool = Field(default=False, description="Take the machine without a notice.")


class ShellRequest(RequestBody):
    """A command, or a shell, beside a worker."""

    worker: str | None = Field(
        default=None, max_length=200, description="Name of the worker (default: the first one)."
    )
    command: list[Annotated[str, Field(max_length=10_000)]] = Field(
        default=[], max_length=1000, description="The command; empty for a shell."
    )


class ShellAccess(Schema):
    """The way to a worker."""

    worker: str
    machine: str
    argv: list[str] = Field(
        description="Command for your computer that does it; empty if it is the stack's computer."
    )
    folder: str | None = Field(description="Folder of the jobs' code on the stack's computer.")
    gpus: str | None = Field(
        default=None, description="The worker's GPUs, as CUDA_VISIBLE_DEVICES; null without one."
    )


class EvictionRequested(Schema):
    """Request to the controller, which soon carries it out once, and its result."""

    id: str
    kind: Literal["evict"] = "evict"
    machine: str
    notice_seconds: float | None
    kill: bool
    state: Literal["waiting", "done", "failed"] = Field(
        default="waiting",
        description="`done`: the provider has accepted it. `waiting` for more than a minute: "
        "whether it was carried out is not known.",
    )
    problem: str | None = Field(default=None, description="Why it failed.")
    remedy: str | None = None


class ServerGaugesView(Schema):
    """Gauges of a server. A value that the server has not reported is null."""

    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = Field(
        default=None, description="Configured memory limit; null if there is none."
    )
    full: bool = Field(
        default=False,
        description="True near the memory limit. A ledger that is full accepts no new jobs.",
    )
    operations_per_second: float | None = None
    replicas: int | None = None
    unreplicated_since: float | None = Field(
        default=None, description="Time since which replicas are missing; null if none are."
    )


class NodeView(ServerGaugesView):
    """A store node: its tensors server, and the parameter server beside it."""

    node: str
    at: float | None = Field(default=None, description="Time of the last heartbeat.")
    pid: int | None = None
    token: int | None = None
    versions: dict[str, int] = Field(default={}, description="Version of the model, by job.")
    publications: dict[str, int] = Field(
        default={}, description="Snapshots published since the server's start, by job."
    )
    publications_per_second: float | None = None
    queued: dict[str, int] = Field(default={}, description="Updates that wait, by job.")


class StoreView(Schema):
    """All servers of the store."""

    nodes: list[NodeView]
    ledger: ServerGaugesView


# -- the stream ---------------------------------------------------------------------------------


class JobBrief(JobRow):
    """The numbers of a job that change while it runs, as the overview shows them."""

    finished_epochs: int
    fraction: float
    updates: int
    accuracy: float | None = Field(description="From the newest evaluation.")
    workers: int
    max_workers: int = Field(description="Workers that the job may have.")
    spent_usd: float
    on_demand_usd: float = Field(description="Cost of the same machines on demand.")


class MachinesBrief(Schema):
    """Changes of machines. Without `changed` and `removed`, there are none."""

    whole: bool = Field(description="True if no other machines are left.")
    changed: list[Machine]
    removed: list[str]


class FleetBrief(Schema):
    """Sums over all machines, and what left the lists of jobs."""

    controller: bool = Field(description="True if a controller is running.")
    machines: int
    joined: int = Field(description="Machines that are part of the cluster.")
    blocked: dict[str, str] = Field(description="Reasons of pools that are backing off.")
    usd_per_hour: float
    deleted: list[str] = Field(default=[], description="Jobs that were deleted last.")


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


class WorkerOrder(BaseModel):
    """A worker that a machine of any provider has to run.

    ``start`` differs for each start of its process.
    """

    model_config = ConfigDict(frozen=True)

    worker: str
    start: str
    job: str
    #: Environment of the process, which contains credentials.
    env: dict[str, str] = Field(repr=False)
