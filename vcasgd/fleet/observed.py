"""State that the controller observes, as plain data: the input of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from vcasgd.fleet.pools import FREE_PROVIDERS, JOIN
from vcasgd.schemas.costs import Offer
from vcasgd.schemas.fleet import Machine
from vcasgd.spec.hardware import Hardware
from vcasgd.spec.sections import Resources

if TYPE_CHECKING:
    from vcasgd.fleet.deadline import Outlook

#: Measured samples per second of one machine, by pool and machine type.
Rates = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class WorkerView:
    """Worker, listed from its request on, so that it isn't started twice.

    ``alive`` is false only if it is known to have ended.
    """

    name: str
    job: str
    machine_id: str
    alive: bool


@dataclass(frozen=True)
class JobDemand:
    """Demand of a job.

    ``wants`` is the number of workers that it could use now, including those that it has.
    ``pools`` are cleared for its data, in order of preference.
    """

    job: str
    minimum: int
    maximum: int
    pools: tuple[str, ...]
    wants: int
    running: bool
    spare: int = 0
    """Further machines to keep ready while the job can use all of its maximum."""
    barred: frozenset[str] = frozenset()
    """Pools of the job that are not, or no longer, cleared for its data."""
    on_demand_minimum: int = 0
    fallback_after: float | None = None
    """Seconds that its spot pools must refuse before the minimum is bought on demand; None means
    never."""
    max_price: float | None = None
    """USD per hour of one machine."""
    affordable: float | None = None
    """USD that may still be committed; None without a budget."""
    rates: Rates = field(default_factory=dict)
    learners: int = 1
    """Largest number on one machine."""
    priority: int = 0
    """Jobs with a higher one get machines first."""
    weight: float = 1.0
    """Share of the machines among jobs of the same priority."""
    owner: str | None = None
    """User who submitted it."""
    limited: str | None = None
    """Why it may have fewer machines than it could use; see :mod:`vcasgd.fleet.plan.shares`."""
    withheld: int = 0
    """Number of machines that it could use beyond those."""
    resources: Resources | None = None
    """Minimum resources of each of its machines."""
    saves: bool = False
    """True if pools of on-demand machines are used as by the fallback, too."""
    outlook: Outlook | None = None
    """Forecast for a deadline; None without one, or until the job's speed is known."""

    @property
    def desired(self) -> int:
        """Number of workers that the job gets if there are enough machines."""
        return max(0, min(self.maximum, self.wants)) if self.running else 0

    @property
    def spares(self) -> int:
        """Number of machines without a worker that wait for the job."""
        return self.spare if self.running and self.wants > self.maximum else 0

    @property
    def needed(self) -> int:
        """Part of :attr:`desired` that has priority over what other jobs desire."""
        return min(self.minimum, self.desired)


@dataclass(frozen=True)
class Market:
    """Zone of a pool, spot or on demand, as of its last response."""

    launches: int = 0
    """Launches with a recorded outcome, including refusals; determines the next token."""
    blocked_until: float = 0.0
    reason: str | None = None
    refused_since: float | None = None
    """Time of the first of consecutive refusals."""


@dataclass(frozen=True)
class PoolStatus:
    """Pool as of its last response.

    The controller publishes it, and other processes, which don't call clouds, plan with that.
    """

    name: str
    launching: int = 0
    """Machines that are ordered, or granted and not listed among the machines yet. One that is
    never listed stops counting after a while."""
    capacity: int | None = None
    """None if only the provider knows it."""
    blocked_until: float = 0.0
    reason: str | None = None
    """Why it is blocked, as text for people."""
    refused_since: float | None = None
    spot: bool = True
    """True if it sells spot machines by default."""
    offers: tuple[Offer, ...] | None = None
    """None until its prices are known; nothing is bought before."""
    markets: Mapping[tuple[str, bool], Market] = field(default_factory=dict)
    """Markets by zone and spot."""
    quotas: Mapping[bool, int] = field(default_factory=dict)
    """Number of machines that the account may have, by spot, if known."""
    boot_seconds: float | None = None
    max_price_per_hour: float | None = None
    """USD of one machine."""
    launching_on_demand: int = 0
    """The part of :attr:`launching` that is not spot."""
    launching_kinds: Mapping[tuple[bool, Hardware], int] = field(default_factory=dict)
    """The part of :attr:`launching` whose hardware is known, by spot and hardware."""
    hardware: tuple[Hardware, ...] = ()
    """Hardware of its machines that reported it."""
    provider: str = ""
    labels: frozenset[str] = frozenset()
    """Labels of data that it is cleared for."""
    trust: str = "own"
    machines: int = 0
    idle: int = 0
    """The part of :attr:`machines` that a following job finds warm."""

    @property
    def kinds(self) -> tuple[Hardware, ...]:
        """Hardware that it sells or has; empty if nothing is known about it."""
        sold = (each.hardware for each in self.offers or ())
        return tuple(dict.fromkeys((*sold, *self.hardware)))

    @property
    def joined(self) -> bool:
        """True if its machines join by themselves: none is bought, and none ends as idle."""
        return self.provider == JOIN

    @property
    def costs_money(self) -> bool:
        """True if its machines may cause a bill."""
        # Prices that are not known yet will be when a job buys.
        return self.provider not in FREE_PROVIDERS and (
            self.offers is None
            or any(max(each.price_per_hour, each.on_demand_price_per_hour) for each in self.offers)
        )

    def market(self, zone: str, spot: bool) -> Market:
        return self.markets.get((zone, spot), Market())

    def launching_of(self, *, spot: bool) -> int:
        """Return the number of launching machines of a kind."""
        return self.launching - self.launching_on_demand if spot else self.launching_on_demand

    def with_room(self, *, vacant: bool = False) -> PoolStatus:
        """Return the pool with the room that is left as its capacity and its quotas.

        With ``vacant``, all machines count as free.
        """
        in_use = 0 if vacant else self.launching + self.machines - self.idle
        return replace(
            self,
            capacity=None if self.capacity is None else max(0, self.capacity - in_use),
            quotas={
                spot: max(0, most - in_use * (spot is self.spot))
                for spot, most in self.quotas.items()
            },
        )

    def to_row(self, position: int) -> dict[str, Any]:
        """Return plain data. ``position`` is the pool's place in the pools file."""
        own = {"name", "labels", "markets", "quotas", "launching_kinds"}
        return {
            **_STATUS.dump_python(self, mode="json", exclude=own),
            "position": position,
            "labels": sorted(self.labels),
            "launches": sum(market.launches for market in self.markets.values()),
            "markets": [
                {"zone": zone, "spot": spot, **asdict(market)}
                for (zone, spot), market in sorted(self.markets.items())
            ],
            "quotas": {"spot" if spot else "on-demand": most for spot, most in self.quotas.items()},
        }

    @classmethod
    def from_row(cls, name: str, row: Mapping[str, Any]) -> PoolStatus:
        """Return the pool that :meth:`to_row` described, possibly in another version."""
        own = {
            "name": name,
            "markets": {(each["zone"], each["spot"]): each for each in row.get("markets") or ()},
            "quotas": {kind == "spot": most for kind, most in (row.get("quotas") or {}).items()},
        }
        return _STATUS.validate_python({**row, **own})


_STATUS = TypeAdapter(PoolStatus)


def pools_in(rows: Mapping[str, Mapping[str, Any]]) -> list[PoolStatus]:
    """Return the pools that the controller published, in the order of the pools file."""
    ordered = sorted(rows.items(), key=lambda row: (int(row[1].get("position") or 0), row[0]))
    return [PoolStatus.from_row(name, row) for name, row in ordered]


@dataclass(frozen=True)
class Limits:
    """Time limits of the plan in seconds; :mod:`vcasgd.fleet.plan` explains each."""

    idle_seconds: float = 60.0
    boot_seconds: float = 300.0
    lost_seconds: float = 30.0
    surplus_seconds: float = 15.0
    dear_seconds: float = 600.0
    billing_seconds: float = 60.0
    """Shortest time that a cloud charges for a machine."""
    exit_seconds: float = 30.0
    """Time until a machine that is given up is gone."""
    claim_seconds: float = 5.0
    hold_seconds: float = 120.0
    return_seconds: float = 1200.0
    age_seconds: float = 600.0


@dataclass(frozen=True)
class ObservationTimes:
    """History of observations.

    It starts empty with each controller, so a restarted one waits for all limits again before it
    gives up machines that it hasn't observed before.
    """

    since: float
    """Start of the observations (Unix seconds)."""
    joined: Mapping[str, float] = field(default_factory=dict)
    """When each machine was last in the cluster."""
    idle: Mapping[str, float] = field(default_factory=dict)
    """Since when each joined machine has had no worker."""
    surplus: Mapping[str, float] = field(default_factory=dict)
    """Since when each job has had more workers than it desires."""
    dear: Mapping[str, float] = field(default_factory=dict)
    """Since when each machine has exceeded its maximum price."""
    short: Mapping[str, float] = field(default_factory=dict)
    """Since when each job has had fewer workers than it desires."""
    needy: Mapping[str, float] = field(default_factory=dict)
    """Since when each job has had fewer workers than its minimum."""
    held: Mapping[str, float] = field(default_factory=dict)
    """Since when each worker has been alive."""
    taken: Mapping[str, tuple[str, str, float]] = field(default_factory=dict)
    """For each machine that was taken from a job for another one: the two jobs, and when."""


@dataclass(frozen=True)
class Observed:
    """Complete observation at one time.

    ``nodes`` are the machines that are in the cluster: their Ray node is alive, or they have
    joined. ``jobs`` are in order of submission.
    """

    ledger: str
    """Identifier of the ledger, for tokens of launches: clouds remember those of lost ledgers."""
    machines: tuple[Machine, ...]
    nodes: frozenset[str]
    workers: tuple[WorkerView, ...]
    jobs: tuple[JobDemand, ...]
    pools: tuple[PoolStatus, ...]
    history: ObservationTimes
    limits: Limits = Limits()
    quarantined: frozenset[str] = frozenset()
    """Machines whose worker repeatedly sent invalid updates."""
    boot_errors: Mapping[str, str] = field(default_factory=dict)
    """Boot error that each machine reported."""
    payers: Mapping[str, str] = field(default_factory=dict)
    """Job that pays for each machine: the last one that ran on it, or the one that launched it."""
    ordered: Mapping[str, int] = field(default_factory=dict)
    """Machines that launches under way may get, by the jobs that pay for them."""
    unpaid: Mapping[str, str] = field(default_factory=dict)
    """Why a machine's payer stops paying for it as soon as possible."""
    draining: Mapping[str, str | None] = field(default_factory=dict)
    """Workers that were asked to leave, each with the job that its machine was taken for."""

    owner_limits: Mapping[str, int] = field(default_factory=dict)
    """Most machines of all jobs of a user together, for users with a limit."""
    ending: frozenset[str] = frozenset()
    """Machines that the provider is being asked to end."""
    gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs of the machines of workers that report more than one, by the names of the workers."""

    def staying(self) -> tuple[Machine, ...]:
        """Return machines without a notice, which can still be relied on."""
        return tuple(one for one in self.occupying() if one.id not in self.ending)

    def occupying(self) -> tuple[Machine, ...]:
        """Return machines that count for the capacity of their pool: all without a notice."""
        return tuple(one for one in self.machines if one.state.stays)


def with_history(state: Observed, now: float) -> Observed:
    """Return the observation with its history updated to ``now`` (Unix seconds).

    Call it before each decision, and pass the history to the next observation.
    """
    present = {one.id for one in state.machines}
    busy = {worker.machine_id for worker in state.workers if worker.alive}
    history = state.history
    joined = {**history.joined, **dict.fromkeys(state.nodes, now)}
    joined = {id_: at for id_, at in joined.items() if id_ in present}
    idle = {id_: history.idle.get(id_, now) for id_ in (state.nodes & present) - busy}
    living = _living(state)
    having = Counter(worker.job for worker in living)
    staying = Counter(worker.job for worker in living if worker.name not in state.draining)
    jobs, short = state.jobs, [job for job in state.jobs if staying[job.job] < job.desired]
    surplus = [job.job for job in jobs if having[job.job] > job.desired]
    needy = [job.job for job in short if staying[job.job] < job.needed]
    history = replace(
        history,
        joined=joined,
        idle=idle,
        surplus=_since(history.surplus, surplus, now),
        short=_since(history.short, (job.job for job in short), now),
        needy=_since(history.needy, needy, now),
        held=_since(history.held, (worker.name for worker in living), now),
        dear=_since(history.dear, _too_dear(state), now),
        taken=_taken(state, now),
    )
    return replace(state, history=history)


def _since(before: Mapping[str, float], found: Iterable[str], now: float) -> dict[str, float]:
    return {name: before.get(name, now) for name in found}


def _taken(state: Observed, now: float) -> dict[str, tuple[str, str, float]]:
    present = {one.id for one in state.machines}
    taken = {id_: each for id_, each in state.history.taken.items() if id_ in present}
    for worker in state.workers:
        successor = state.draining.get(worker.name)
        if successor is not None and worker.alive and worker.machine_id in present:
            taken[worker.machine_id] = (worker.job, successor, now)
    return taken


def _living(state: Observed) -> list[WorkerView]:
    staying = {one.id for one in state.staying()}
    return [one for one in state.workers if one.alive and one.machine_id in staying]


def highest_price(pool: PoolStatus | None, job: JobDemand | None) -> float:
    """Return the maximum price of the pool's machines in USD per hour for a job, or for any job."""
    limits = (pool.max_price_per_hour if pool else None, job.max_price if job else None)
    return min((each for each in limits if each is not None), default=float("inf"))


def _too_dear(state: Observed) -> list[str]:
    pools = {pool.name: pool for pool in state.pools}
    jobs = {job.job: job for job in state.jobs}
    works_for = {worker.machine_id: jobs.get(worker.job) for worker in _living(state)}
    return [
        one.id
        for one in state.staying()
        if one.price_per_hour > highest_price(pools.get(one.pool), works_for.get(one.id))
    ]
