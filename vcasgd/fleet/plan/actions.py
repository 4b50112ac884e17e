"""What may be decided. Every action may be carried out twice."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Launch:
    """Ask the pool for up to ``count`` machines; ``None``: whatever the pool has."""

    pool: str
    count: int
    token: str
    zone: str | None = None
    instance_types: tuple[str, ...] | None = None
    spot: bool | None = None
    jobs: tuple[str, ...] = field(default=(), compare=False)
    """For whom, one for each machine: who pays until somebody works on it. No part of what is
    asked of the cloud."""


@dataclass(frozen=True)
class StartWorker:
    instance_id: str
    job: str
    learner: int = 1
    """The plan starts the first one; see :mod:`vcasgd.controller.fleet.learners`."""


@dataclass(frozen=True)
class StopWorker:
    """Ask the worker to push what it has and to leave; its machine stays, and is promised
    to others already, so a worker that does not leave in time has to be killed."""

    name: str
    reason: str


@dataclass(frozen=True)
class Terminate:
    instance_id: str
    reason: str


@dataclass(frozen=True)
class Blame:
    """A machine of this market never joined: leave the market alone for a while. ``reason``
    goes on from the machine's name."""

    instance_id: str
    pool: str
    zone: str
    spot: bool
    reason: str


Action = Launch | StartWorker | StopWorker | Terminate | Blame
