"""Machines that join by themselves."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from vcasgd.printable import printable
from vcasgd.schemas.base import RequestBody, Schema
from vcasgd.schemas.fleet import WorkerOrder

#: Most workers of one machine, and letters of the reason for which one has ended. The ledger keeps
#: the last report of each machine.
MAX_WORKERS, MAX_REASON_LENGTH = 64, 500

#: Header with the secret that a machine chose for itself when it joined, and its least length. The
#: token is shared by all machines of a pool; this shows that a request is of the machine itself.
MACHINE_SECRET, MIN_MACHINE_SECRET = "X-Vcasgd-Machine", 32

_Name = Annotated[str, Field(min_length=1, max_length=255), AfterValidator(printable)]
#: Names of files on the machine.
_FileName = Annotated[str, Field(pattern=r"^[\w-]{1,100}$")]
#: Only variables of vcasgd: others could change the programs that start a worker's sandbox.
_Variable = Annotated[str, Field(pattern=r"^VCASGD_[A-Z_]+$")]


class JoinRequest(RequestBody):
    """A machine that wants to join, and what it has measured about itself."""

    version: _Name = Field(description="Version of vcasgd on the machine.")
    host: _Name = Field(description="Name of the machine, for people.")
    cpus: float = Field(gt=0, le=100_000, description="Processors that workers may use.")
    memory_mb: int = Field(ge=0, le=1_000_000_000, description="Memory, in MB.")
    gpus: int = Field(default=0, ge=0, le=1000)
    gpu: Annotated[str, AfterValidator(printable)] = Field(
        default="", max_length=100, description="Name of the GPU."
    )
    gpu_memory_mb: int | None = Field(
        default=None, ge=1, le=10_000_000, description="Memory of one GPU, in MB."
    )
    machine: str | None = Field(
        default=None,
        max_length=100,
        description="Name of the machine, if the stack ordered it.",
    )

    def __str__(self) -> str:
        gpu = f"{self.gpus} × {self.gpu}" if self.gpus else "no GPU"
        return f"{self.cpus:g} processors, {self.memory_mb / 1000:.0f} GB of memory, {gpu}"


class JoinView(Schema):
    """A machine that has joined."""

    machine: str
    pool: str
    cluster: str
    services: list[_FileName] = Field(description="Names of the servers behind the gateway.")
    period: float = Field(description="Seconds between two reports.")
    heartbeat: float = Field(description="Seconds between two heartbeats of a worker.")
    expires_at: float | None = Field(default=None, description="End of the token; null: never.")


class WorkerReport(RequestBody):
    """State of a worker on a machine."""

    start: _Name = Field(description="Value of `start` in the order.")
    ended: Annotated[str, AfterValidator(printable)] | None = Field(
        default=None,
        max_length=MAX_REASON_LENGTH,
        description="Why its process has ended; null: it runs.",
    )


class ReportBody(RequestBody):
    """Report of a machine."""

    workers: dict[_Name, WorkerReport] = Field(default_factory=dict, max_length=MAX_WORKERS)
    leaving: bool = Field(default=False, description="True: it takes no further work.")


class OrderView(Schema, WorkerOrder):
    """A worker that the machine has to run."""

    start: _FileName = Field(description="Differs for each start of the worker's process.")
    name: str = Field(description="Name of the job, for people.")
    package: _FileName = Field(description="Digest of the job's code.")
    env: dict[_Variable, str] = Field(
        repr=False,
        description="Environment of its process, with credentials for this job only. In URLs, "
        "`/sockets` stands for the folder with one Unix socket for each service.",
    )
    progress: float | None = Field(default=None, description="Finished part of the job, 0 to 1.")
    doing: str | None = Field(default=None, description="What the worker does.")
    samples: int | None = Field(default=None, description="Samples that the worker has trained.")


class ReportView(Schema):
    """Orders for a machine. Workers that are not listed have to be killed."""

    orders: list[OrderView] = Field(max_length=MAX_WORKERS)
    leave: str | None = Field(default=None, description="Why the machine has to leave, if it has.")
    leave_by: float | None = Field(default=None, description="Seconds that it has for that.")
    version: str = Field(
        default="", description="Version of the stack. A machine with another one has to leave."
    )
