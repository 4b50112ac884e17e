"""Observation of everything that decisions depend on: machines, workers, jobs, pools."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from vcasgd.controller.fleet.act import drain_seconds
from vcasgd.controller.fleet.demands import Demands, owner_limits
from vcasgd.controller.fleet.fleet import Fleet
from vcasgd.fleet.notices import Notice, NoticeKind
from vcasgd.fleet.observed import (
    JobDemand,
    Limits,
    ObservationTimes,
    Observed,
    PoolStatus,
    with_history,
)
from vcasgd.fleet.plan.shares import within_limits
from vcasgd.fleet.pools import JOIN
from vcasgd.logging import isolated
from vcasgd.schemas.costs import Offer
from vcasgd.schemas.fleet import Machine, MachineState
from vcasgd.spec.hardware import Hardware
from vcasgd.store.ledger.api_tokens import ApiToken, ApiTokens
from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.untrusted import Heartbeat
from vcasgd.worker_names import job_of, machine_of

#: Seconds that AWS and GCP bill at least; beyond that they bill by the second.
BILLING_SECONDS = 60.0
#: Most GPUs of a machine; a worker that reports more isn't believed.
MAX_GPUS = 16
#: Seconds between the request to end a machine and the end of its bill.
TERMINATE_SECONDS = 10.0

#: Seconds for which a pool that can't be judged yet is not used; each round judges again.
UNKNOWN_SECONDS = 1.0
#: Times that a machine is held until the job that it was taken from can take it back.
RETURN_HOLDS = 10.0

#: Heartbeats by job and worker.
Beats = Mapping[str, Mapping[str, Heartbeat]]


class Observer:
    """Observes once per round, and remembers since when things are as they are."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._jobs, self._pools = fleet, fleet.jobs, fleet.pools
        self._cloud, self._launches = fleet.cloud, fleet.launches
        self._workplaces = fleet.workplaces
        self._demands = Demands(fleet.jobs, fleet.costs, fleet.clearance, fleet.speeds)
        self._tokens = ApiTokens(fleet.ledger)
        self._history = ObservationTimes(since=fleet.clock())
        #: Machines that could still be used at the last observation.
        self._staying: frozenset[str] = frozenset()

    def observe(self, now: float, successors: Mapping[str, str]) -> Observed:
        """Return the state of everything.

        ``successors``: the jobs that machines of leaving workers were taken for, by worker.
        Raises :class:`~vcasgd.errors.ClusterError` if Ray's head was lost.
        """
        state = with_history(within_limits(self._observe(now, successors), now), now)
        self._history = state.history
        return state

    @property
    def has_machines(self) -> bool:
        """True if there was a machine, or a node of one, at the last observation."""
        return bool(self._staying or self._workplaces.nodes)

    def lost_machines(self) -> bool:
        """Return True if a machine has gone, or is about to go, since the last observation.

        Raises :class:`~vcasgd.errors.ClusterError` if Ray's head was lost.
        """
        self._cloud.refresh()
        staying = {one.id for one in self._cloud.machines() if one.state.stays}
        return not self._staying <= staying | self._cloud.ending or self._workplaces.lost_nodes()

    def _observe(self, now: float, successors: Mapping[str, str]) -> Observed:
        self._cloud.refresh()
        jobs, limits = self._demands.active_jobs(self._pools.specs), self._limits()
        self._workplaces.refresh()
        names = [job.id for job in jobs]
        draining = self._jobs.workers.draining_of(names).values()
        beats, quarantined = (
            self._fleet.beats.of_many(names),
            self._jobs.workers.quarantined_of(names),
        )
        machines = self._machines(now)
        self._staying = frozenset(one.id for one in machines if one.state.stays)
        self._measure(jobs, beats, machines, limits, now)
        self._launches.load(now)
        self._launches.joined(one for one in machines if one.id in self._workplaces.nodes)
        in_use = Counter(one.pool for one in machines if one.state.stays)
        reported = _reported(machines)
        views = tuple(
            self._pool(name, in_use[name], reported[name], now) for name in self._pools.specs
        )
        self._fleet.clearance.kinds = {view.name: view.kinds for view in views}
        offers: dict[str, Sequence[Offer]] = {view.name: view.offers or () for view in views}
        payers = self._fleet.costs.payers
        paid: defaultdict[str, list[Machine]] = defaultdict(list)
        for one in (*machines, *self._cloud.unlisted()):
            if payer := payers.get(one.id):
                paid[payer].append(one)
        tokens = self._tokens.all()
        return Observed(
            ledger=self._fleet.ledger_id,
            machines=machines,
            nodes=self._workplaces.nodes,
            workers=self._workplaces.workers,
            jobs=tuple(self._job_demands(jobs, paid, offers, limits, tokens, now)),
            pools=views,
            history=self._history,
            limits=limits,
            # Workers choose the names that they report under, and whom they blame.
            quarantined=frozenset(
                machine_of(worker)
                for workers in quarantined.values()
                for worker in self._workplaces.placed.intersection(workers)
            ),
            boot_errors=self._boot_errors(machines),
            payers=payers,
            ordered={job.id: len(self._cloud.ordered(job.id)) for job in jobs},
            unpaid=self._demands.unpaid(jobs),
            draining={one: successors.get(one) for workers in draining for one in workers},
            owner_limits=owner_limits(jobs, tokens),
            ending=self._cloud.ending,
            gpus=_gpus(beats),
        )

    def _job_demands(
        self,
        jobs: Sequence[JobRecord],
        paid: Mapping[str, Sequence[Machine]],
        offers: Mapping[str, Sequence[Offer]],
        limits: Limits,
        tokens: Mapping[str, ApiToken],
        now: float,
    ) -> Iterator[JobDemand]:
        """Yield the demand of each job. ``paid``: the machines that each job pays for."""
        work = self._jobs.work_of([job.id for job in jobs])
        ordered = {job.id: [*paid.get(job.id, ()), *self._cloud.ordered(job.id)] for job in jobs}
        cluster = self._fleet.settings.monthly_budget_usd
        self._demands.set_months(jobs, {**paid, **ordered}, cluster, tokens, limits, now)
        for job in jobs:
            with isolated(job.id, job.request):
                own = ordered[job.id]
                yield self._demands.of(job, own, offers, limits, now, work[job.id])

    def _limits(self) -> Limits:
        """Return the plan's limits.

        A machine that is given up is noticed in the next round, its worker drains, and then its
        cloud takes some seconds.
        """
        drain = drain_seconds(self._fleet.settings)
        return Limits(
            idle_seconds=self._fleet.settings.idle_seconds,
            exit_seconds=self._fleet.settings.heartbeat + drain + TERMINATE_SECONDS,
            hold_seconds=self._fleet.settings.hold_seconds,
            return_seconds=RETURN_HOLDS * self._fleet.settings.hold_seconds,
            billing_seconds=0.0 if self._pools.only_local else BILLING_SECONDS,
        )

    # -- machines ------------------------------------------------------------------------------

    def _machines(self, now: float) -> tuple[Machine, ...]:
        """Return all listed machines, with the notices that only they themselves have received."""
        notices = self._workplaces.notices
        return tuple(_with_notice(one, notices.get(one.id), now) for one in self._cloud.machines())

    def _boot_errors(self, machines: Iterable[Machine]) -> dict[str, str]:
        """Return the boot errors that machines report which never joined, by machine."""
        joined = {*self._history.joined, *self._workplaces.nodes}
        return self._cloud.boot_errors(
            [one for one in machines if one.id not in joined and one.state.stays]
        )

    def _measure(
        self,
        jobs: Iterable[JobRecord],
        beats: Beats,
        machines: Sequence[Machine],
        limits: Limits,
        now: float,
    ) -> None:
        """Record what machines cost and how fast they are."""
        self._fleet.costs.record(
            machines,
            joined={*self._history.joined, *self._workplaces.nodes},
            works_for={w.machine_id: w.job for w in self._workplaces.workers if w.alive},
            unlisted=[one.id for one in self._cloud.unlisted()],
            billing_seconds=limits.billing_seconds,
            now=now,
        )
        by_id = {one.id: one for one in machines}
        for job in jobs:
            with isolated(job.id, job.request):
                self._fleet.speeds.measure(job, beats[job.id], by_id, now)
                if (text := self._fleet.speeds.estimate(job, beats[job.id])) is not None:
                    self._jobs.announce(job.id, "estimate", "estimate", text)
        self._fleet.speeds.write()

    # -- pools ---------------------------------------------------------------------------------

    def _pool(self, name: str, in_use: int, hardware: Iterable[Hardware], now: float) -> PoolStatus:
        spec, stored = self._pools.specs[name], self._launches.pool(name)
        offers, problem = self._cloud.offers(name)
        capacity = self._capacity(name)
        coming = [one for one in self._cloud.coming() if one.pool == name]
        reasons, unknown = self._launches.reasons(name, now), self._cloud.unknown(name)
        if unknown is not None:
            reasons.append(unknown)
        if problem is not None:
            reasons.append(f"no prices: {problem}")
        if spec.provider == JOIN and not in_use:
            reasons.append("no machine has joined")
        if capacity is not None and in_use >= capacity and not reasons:
            reasons.append(f"{in_use} of {capacity} machines in use")
        return PoolStatus(
            name=name,
            launching=len(coming),
            capacity=capacity,
            # It must not buy what it may already have.
            blocked_until=max(stored.blocked_until, now + UNKNOWN_SECONDS if unknown else 0.0),
            reason="; ".join(reasons) or None,
            refused_since=stored.refused_since,
            spot=spec.spot,
            offers=offers,
            markets=self._launches.markets(name, now),
            quotas=self._launches.quotas(name, now),
            boot_seconds=spec.boot_seconds,
            max_price_per_hour=spec.max_price_per_hour,
            launching_on_demand=sum(not one.spot for one in coming),
            launching_kinds=Counter((one.spot, one.hardware) for one in coming if one.hardware),
            hardware=tuple(hardware),
            provider=spec.provider,
            labels=spec.labels,
            trust=spec.trust,
        )

    def _capacity(self, pool: str) -> int | None:
        of_provider = self._pools.providers[pool].capacity(pool)
        limits = (self._pools.specs[pool].max_machines, of_provider)
        return min((each for each in limits if each is not None), default=None)


def _with_notice(one: Machine, notice: Notice | None, now: float) -> Machine:
    if notice is None:
        return one
    if notice.kind is NoticeKind.TERMINATE and one.state is not MachineState.LEAVING:
        changes = {"state": MachineState.LEAVING, "notice_at": notice.at}
        return one.model_copy(update=changes)
    if notice.kind is NoticeKind.REBALANCE and one.advised_at is None:
        return one.model_copy(update={"advised_at": notice.at or now})
    return one


def _reported(machines: Iterable[Machine]) -> defaultdict[str, dict[Hardware, None]]:
    """Return, by pool, what machines reported of themselves; each kind is there once."""
    kinds: defaultdict[str, dict[Hardware, None]] = defaultdict(dict)
    for one in machines:
        if one.hardware is not None and one.state.stays:
            kinds[one.pool][one.hardware] = None
    return kinds


def _gpus(beats: Mapping[str, Mapping[str, Heartbeat]]) -> dict[str, int]:
    """Return for how many workers the GPUs of each worker's machine are, if for more than one."""
    # A worker may report under the name of another job's.
    workers = {n: beat for job, own in beats.items() for n, beat in own.items() if job_of(n) == job}
    counts = {
        name: min(beat.gpus or 0, MAX_GPUS) // beat.ranks
        for name, beat in workers.items()
        if beat.ranks
    }
    return {name: count for name, count in counts.items() if count > 1}
