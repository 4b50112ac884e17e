"""What the controller sees, as plain data: the input of :func:`vcasgd.fleet.plan.decide`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vcasgd.fleet.providers.base import Instance, InstanceState


@dataclass(frozen=True)
class WorkerView:
    """A worker, from the moment that it is asked for: only one that is listed is not started
    a second time. ``alive`` is false only when it is known to have ended."""

    name: str
    job: str
    instance_id: str
    alive: bool


@dataclass(frozen=True)
class JobDemand:
    """What a job asks for. ``wants`` is how many workers it could use now, those included
    that it has; ``pools`` are in order of preference."""

    job: str
    minimum: int
    maximum: int
    pools: tuple[str, ...]
    wants: int
    running: bool

    @property
    def desired(self) -> int:
        return max(0, min(self.maximum, self.wants)) if self.running else 0

    @property
    def needed(self) -> int:
        """The part of :attr:`desired` that goes before other jobs' wishes."""
        return min(self.minimum, self.desired)


@dataclass(frozen=True)
class PoolView:
    """A pool as it answered last."""

    name: str
    launches: int = 0
    """Launches whose outcome is recorded, refusals too: it makes the next token."""
    launching: int = 0
    """Machines that were granted but are not listed among the instances yet. Who counts them
    gives up on one that is never listed."""
    capacity: int | None = None
    """``None``: only the provider knows."""
    blocked_until: float = 0.0
    reason: str | None = None
    """Why it is blocked, for people."""


@dataclass(frozen=True)
class Limits:
    """How patient the plan is, in seconds; the reason for each is in :mod:`vcasgd.fleet.plan`."""

    idle_seconds: float = 60.0
    boot_seconds: float = 300.0
    lost_seconds: float = 30.0
    surplus_seconds: float = 15.0


@dataclass(frozen=True)
class History:
    """Since when things are as they are. Starts empty with each controller, so a restarted
    one is patient again rather than quick to judge machines that it has not seen before."""

    since: float
    """When somebody began to look (Unix seconds), or could look again."""
    joined: Mapping[str, float] = field(default_factory=dict)
    """Instance to when its Ray node was last seen alive."""
    idle: Mapping[str, float] = field(default_factory=dict)
    """Instance to since when it has been joined and without a worker."""
    surplus: Mapping[str, float] = field(default_factory=dict)
    """Job to since when it has had more workers than it desires."""


@dataclass(frozen=True)
class Observed:
    """One look at everything.

    ``nodes`` are the instances whose Ray node is alive; ``None`` when Ray can't be reached,
    which says nothing about the machines. ``jobs`` are in order of submission.
    """

    cluster: str
    instances: tuple[Instance, ...]
    nodes: frozenset[str] | None
    workers: tuple[WorkerView, ...]
    jobs: tuple[JobDemand, ...]
    pools: tuple[PoolView, ...]
    history: History
    limits: Limits = Limits()
    quarantined: frozenset[str] = frozenset()
    """Instances whose worker sent what could not be used, again and again."""

    def staying(self) -> tuple[Instance, ...]:
        """Instances without a notice: those that can still be counted on."""
        states = (InstanceState.BOOTING, InstanceState.RUNNING)
        return tuple(one for one in self.instances if one.state in states)


def remember(state: Observed, now: float) -> Observed:
    """The same with its history brought up to ``now``; call it before each decision and pass
    the history on to the next look."""
    present = {one.id for one in state.instances}
    busy = {worker.instance_id for worker in state.workers if worker.alive}
    history = state.history
    if state.nodes is None:
        joined = dict.fromkeys(history.joined.keys() & present, now)
        history = replace(history, since=now, joined=joined, idle={})
    else:
        joined = {**history.joined, **dict.fromkeys(state.nodes, now)}
        joined = {id_: at for id_, at in joined.items() if id_ in present}
        idle = {id_: history.idle.get(id_, now) for id_ in (state.nodes & present) - busy}
        history = replace(history, joined=joined, idle=idle)
    living = Counter(worker.job for worker in _living(state))
    surplus = [job.job for job in state.jobs if living[job.job] > job.desired]
    history = replace(history, surplus={job: history.surplus.get(job, now) for job in surplus})
    return replace(state, history=history)


def _living(state: Observed) -> list[WorkerView]:
    staying = {one.id for one in state.staying()}
    return [one for one in state.workers if one.alive and one.instance_id in staying]
