"""Actions that the plan can decide, and names of launches and markets.

Every action may be carried out twice.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Launch:
    """Request up to ``count`` machines in a market."""

    pool: str
    count: int
    token: str
    zone: str
    machine_types: tuple[str, ...]
    spot: bool
    jobs: tuple[str, ...] = field(default=(), compare=False)
    """Jobs that pay for the machines until a worker runs on them, one per machine; not part of the
    request to the cloud."""


@dataclass(frozen=True)
class StartWorker:
    """Start a worker for a job on a machine."""

    machine_id: str
    job: str
    learner: int = 1
    """Number of the learner. The plan starts the first; see
    :mod:`vcasgd.controller.fleet.learners` for the others."""


@dataclass(frozen=True)
class StopWorker:
    """Ask the worker to push its progress and leave.

    Its machine stays and is already reassigned, so a worker that doesn't leave in time is killed.
    """

    name: str
    reason: str
    successor: str | None = None
    """Job for which the machine is taken from a job that could still use it."""


@dataclass(frozen=True)
class Terminate:
    """End a machine."""

    machine_id: str
    reason: str


@dataclass(frozen=True)
class Blame:
    """Back off from a market whose machine never joined.

    ``reason`` continues a sentence that starts with the machine's id.
    """

    machine_id: str
    pool: str
    zone: str
    spot: bool
    reason: str


Action = Launch | StartWorker | StopWorker | Terminate | Blame


def launch_token(cluster: str, market: str, launches: int) -> str:
    """Return a launch's token, equal for equal arguments; a UUID, which every cloud accepts."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"vcasgd/{cluster}/{market}/{launches}"))


def market_name(pool: str, zone: str, spot: bool) -> str:
    """Return the name under which a market's launches are counted."""
    return f"{pool}/{zone}/{'spot' if spot else 'on-demand'}"
