"""What the controller sees, as plain data: the input of :func:`vcasgd.fleet.plan.decide`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vcasgd.fleet.providers.base import Instance, InstanceState, Offer

#: measured samples a second of one machine, by pool and instance type
Rates = Mapping[tuple[str, str], float]


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
    that it has; ``pools`` are in order of preference, and may see its data."""

    job: str
    minimum: int
    maximum: int
    pools: tuple[str, ...]
    wants: int
    running: bool
    barred: frozenset[str] = frozenset()
    """Pools that it names and that may not see its data, or no longer."""
    on_demand_minimum: int = 0
    fallback_after: float | None = None
    """Seconds that its spot pools must have refused before the minimum is bought on demand;
    ``None``: never."""
    max_price: float | None = None
    """USD an hour, of one machine."""
    affordable: float | None = None
    """USD that may still be promised; ``None``: it has no budget."""
    rates: Rates = field(default_factory=dict)
    learners: int = 1
    """On one machine, at most."""

    @property
    def desired(self) -> int:
        return max(0, min(self.maximum, self.wants)) if self.running else 0

    @property
    def needed(self) -> int:
        """The part of :attr:`desired` that goes before other jobs' wishes."""
        return min(self.minimum, self.desired)


@dataclass(frozen=True)
class Market:
    """A zone of a pool, spot or on demand, as it answered last."""

    launches: int = 0
    blocked_until: float = 0.0
    reason: str | None = None
    refused_since: float | None = None
    """Of the first refusal in a row."""


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
    refused_since: float | None = None
    spot: bool = True
    """What it sells unless asked for something else."""
    offers: tuple[Offer, ...] | None = None
    """``None``: its prices are not known yet."""
    markets: Mapping[tuple[str, bool], Market] = field(default_factory=dict)
    """By zone and whether it is spot."""
    quotas: Mapping[bool, int] = field(default_factory=dict)
    """By whether it is spot: how many machines the account may have, where that is known."""
    boot_seconds: float | None = None
    max_price: float | None = None
    """USD an hour, of one machine."""
    launching_on_demand: int = 0
    """The part of :attr:`launching` that is not spot."""

    def market(self, zone: str, spot: bool) -> Market:
        return self.markets.get((zone, spot), Market())

    def launching_of(self, *, spot: bool) -> int:
        return self.launching - self.launching_on_demand if spot else self.launching_on_demand


@dataclass(frozen=True)
class Limits:
    """How patient the plan is, in seconds; the reason for each is in :mod:`vcasgd.fleet.plan`."""

    idle_seconds: float = 60.0
    boot_seconds: float = 300.0
    lost_seconds: float = 30.0
    surplus_seconds: float = 15.0
    dear_seconds: float = 600.0
    billing_seconds: float = 60.0
    """What a cloud charges at least for a machine."""
    exit_seconds: float = 30.0
    """Until a machine that is given up is gone."""


@dataclass(frozen=True)
class LaunchCounts:
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
    dear: Mapping[str, float] = field(default_factory=dict)
    """Instance to since when it has cost more than it may."""


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
    history: LaunchCounts
    limits: Limits = Limits()
    quarantined: frozenset[str] = frozenset()
    """Instances whose worker sent what could not be used, again and again."""
    boot_errors: Mapping[str, str] = field(default_factory=dict)
    """Instance to what it said of its boot that failed."""
    payers: Mapping[str, str] = field(default_factory=dict)
    """Instance to the job that pays for it: who works on it, or did last, or had it launched."""
    unpaid: Mapping[str, str] = field(default_factory=dict)
    """Instance to why its payer pays for it no longer than it has to."""

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
    dear = {id_: history.dear.get(id_, now) for id_ in _too_dear(state)}
    history = replace(history, dear=dear)
    return replace(state, history=history)


def _living(state: Observed) -> list[WorkerView]:
    staying = {one.id for one in state.staying()}
    return [one for one in state.workers if one.alive and one.instance_id in staying]


def highest_price(pool: PoolView | None, job: JobDemand | None) -> float:
    """USD an hour that a machine of the pool may cost the job; without a job: anybody."""
    limits = (pool.max_price if pool else None, job.max_price if job else None)
    return min((each for each in limits if each is not None), default=float("inf"))


def _too_dear(state: Observed) -> list[str]:
    pools = {pool.name: pool for pool in state.pools}
    jobs = {job.job: job for job in state.jobs}
    works_for = {worker.instance_id: jobs.get(worker.job) for worker in _living(state)}
    return [
        one.id
        for one in state.staying()
        if one.price_per_hour > highest_price(pools.get(one.pool), works_for.get(one.id))
    ]
