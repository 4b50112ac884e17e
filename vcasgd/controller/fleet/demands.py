"""Demands of the active jobs, within their budgets, and in pools that may see their data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from vcasgd.controller.fleet.costs import CostLedger, Speeds
from vcasgd.errors import JobUnreadable, NotFound
from vcasgd.fleet import deadline
from vcasgd.fleet.costs import Budget, commitment, monthly_budgets
from vcasgd.fleet.observed import JobDemand, Limits
from vcasgd.fleet.plan.purchases import price_of
from vcasgd.fleet.pools import PoolSpec, pools_of_job
from vcasgd.logging import isolated
from vcasgd.schemas.costs import Offer
from vcasgd.schemas.fleet import Machine
from vcasgd.settings import Settings
from vcasgd.spec.hardware import Hardware, suits
from vcasgd.spec.job import PRIORITIES, JobState
from vcasgd.store.admission import worker_lease_pass
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.api_tokens import ApiToken
from vcasgd.store.ledger.job import WITH_MACHINES, JobRecord
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.machines import JoinedMachines
from vcasgd.store.ledger.placement import Clearances, Owners
from vcasgd.worker_names import machine_of


class ClearancePolicy:
    """Keeps jobs out of pools that may not see them; the ledger checks it again for each lease."""

    def __init__(self, settings: Settings, ledger: RedisClient) -> None:
        self._settings = settings
        self._jobs = Jobs(ledger)
        self._clearances = Clearances(ledger)
        self._machines = JoinedMachines(ledger, settings.lease_seconds)
        self._owners = Owners(ledger)
        self._published: dict[str, frozenset[str]] | None = None
        self._pools: dict[str, PoolSpec] = {}
        #: Known hardware of the machines of each pool.
        self.kinds: Mapping[str, Collection[Hardware]] = {}

    def set_pools(self, pools: dict[str, PoolSpec]) -> None:
        """Set the present pools, and publish their labels to the ledger before anything else."""
        allowed = {name: frozenset(pool.labels) for name, pool in pools.items()}
        if allowed != self._published:
            self._clearances.allow(allowed)
            self._published = allowed
        self._pools = pools

    def divide(self, job: JobRecord) -> tuple[tuple[str, ...], frozenset[str]]:
        """Return the job's pools that may see it, in its order, and all pools that may not."""
        barred = {}
        for name, pool in self._pools.items():
            if missing := [each for each in job.spec.required_labels if each not in pool.labels]:
                barred[name] = f"may not see {', '.join(missing)}"
        named = [name for name in self.wanted(job) if name in self._pools]
        for name in named:
            if why := barred.get(name):
                text = f"pool {name} can't run this job: it {why}"
                self._jobs.announce(job.id, text, "pool-refused", text, pool=name, why=why)
        return tuple(name for name in named if name not in barred), frozenset(barred)

    def wanted(self, job: JobRecord) -> tuple[str, ...]:
        """Return the pools that the job names, or the default ones."""
        return pools_of_job(job.spec, self._pools.values(), self.kinds)

    def specs(self, names: Iterable[str]) -> list[PoolSpec]:
        """Return the present pools of these names."""
        return [self._pools[name] for name in names if name in self._pools]

    def is_volunteer(self, pool: str) -> bool:
        """Return True if the machines of a pool belong to people who aren't well known."""
        return pool in self._pools and self._pools[pool].trust == "volunteer"

    def place(self, pools: Mapping[str, Mapping[str, str]]) -> None:
        """Record pools and owners of each job's workers; call it before they are started."""
        self._owners.place(
            {
                job: {
                    worker: self._machines.owner(machine_of(worker))
                    for worker, pool in workers.items()
                    if self.is_volunteer(pool)
                }
                for job, workers in pools.items()
            }
        )
        self._clearances.place(
            {
                job: {
                    worker: (pool, worker_lease_pass(self._settings, job, worker))
                    for worker, pool in workers.items()
                }
                for job, workers in pools.items()
            }
        )


class Demands:
    """Computes what each job asks for; pauses and fails jobs that can't get machines."""

    def __init__(
        self, jobs: Jobs, costs: CostLedger, clearance: ClearancePolicy, speeds: Speeds
    ) -> None:
        self._jobs = jobs
        self._costs = costs
        self._clearance = clearance
        self._speeds = speeds
        self._ended: dict[str, JobRecord | None] = {}
        #: Outlooks on deadlines as they were recorded last.
        self._outlooks: dict[str, str] = {}
        #: Budgets of this month, by user, and that of the cluster.
        self._months: Mapping[str | None, Budget] = {}

    def active_jobs(self, pools: Collection[str]) -> list[JobRecord]:
        """Return the active jobs, oldest first; fail those that none of ``pools`` can serve.

        Forgets all other jobs.
        """
        jobs = []
        for name, job in self._jobs.get_many(self._jobs.active()).items():
            with isolated(name):
                if job.state is JobState.STARTING and not self._clearance.divide(job)[0]:
                    why = _no_pool(job, self._clearance.wanted(job), pools)
                    self._jobs.transition(job.id, JobState.FAILED, [JobState.STARTING], why=why)
                jobs.append(job)
        self._speeds.keep(jobs)
        self._outlooks = {
            job.id: self._outlooks[job.id] for job in jobs if job.id in self._outlooks
        }
        return jobs

    def set_months(
        self,
        jobs: Sequence[JobRecord],
        own: Mapping[str, Sequence[Machine]],
        cluster: float | None,
        tokens: Mapping[str, ApiToken],
        limits: Limits,
        now: float,
    ) -> None:
        """Set the budgets of this month, once in a round. ``own``: the machines by their payers."""
        limited = [(None, cluster), *((n, token.max_usd_per_month) for n, token in tokens.items())]
        given = {user: usd for user, usd in limited if usd is not None}
        if not given:
            self._months = {}
            return
        owners = {job.id: job.owner for job in jobs}
        # Machines of a job that has ended cost its user until they are gone.
        ended = map(self._inactive, self._costs.paid.keys() - owners.keys())
        owners |= {job.id: job.owner for job in ended if job}
        committed: defaultdict[str | None, float] = defaultdict(float)
        for job, machines in own.items():
            committed[owners.get(job)] += commitment(machines, limits, now)
        running = Counter(job.owner for job in jobs if job.state in WITH_MACHINES)
        spent = self._costs.spent_in_month(owners, now)
        self._months = monthly_budgets(given, spent, committed, running)

    def _months_of(self, job: JobRecord) -> list[Budget]:
        users = {None, job.owner}
        return [self._months[user] for user in users if user in self._months]

    def of(
        self,
        job: JobRecord,
        own: Sequence[Machine],
        offers: Mapping[str, Sequence[Offer]],
        limits: Limits,
        now: float,
        work: Mapping[str, int],
    ) -> JobDemand:
        """Return the demand of a job; pause the job first if its budget is used up.

        ``own`` are the machines that it pays for, with those that were launched and are not listed
        yet, and those that launches under way may get for it. ``work`` is :meth:`Jobs.work`.
        """
        workers = job.spec.workers
        most = (job.facts.most_workers(job.spec) if job.facts else None) or workers.max
        pools, barred = self._clearance.divide(job)
        offered = [
            each
            for pool in pools
            for each in offers.get(pool, ())
            if suits(job.spec.resources, (each.hardware,))
        ]
        left, why = self._budget(job, own, limits, _least_cost(limits, offered), now)
        has_machines = job.state in WITH_MACHINES
        if has_machines and why:
            self._jobs.transition(job.id, JobState.PAUSED, WITH_MACHINES, why=why)
        demand = JobDemand(
            job=job.id,
            minimum=workers.min,
            maximum=min(workers.max, most),
            pools=pools,
            wants=_work_items(job, work),
            running=has_machines and not why,
            spare=workers.spare,
            barred=barred,
            on_demand_minimum=workers.on_demand_min,
            fallback_after=workers.fallback_after.total_seconds() if workers.fallback else None,
            max_price=workers.max_price_per_hour,
            affordable=left,
            rates=self._speeds.workload(job).speeds,
            learners=job.spec.tuning.learners_per_machine,
            priority=PRIORITIES[job.spec.priority],
            weight=job.spec.weight,
            owner=job.owner,
            resources=job.spec.resources,
        )
        if job.deadline is None or not demand.running:
            return demand
        return self._before_deadline(job, demand, own, offered, now)

    def _before_deadline(
        self,
        job: JobRecord,
        demand: JobDemand,
        own: Sequence[Machine],
        offered: Sequence[Offer],
        now: float,
    ) -> JobDemand:
        """Return the demand of a job with a deadline, and record the outlook."""
        staying = [one for one in own if one.state.stays]
        view = self._outlook(job, demand, staying, offered, now)
        saves = any(pool.spot for pool in self._clearance.specs(demand.pools))
        text = deadline.outlook_text(view, saves=saves)
        if self._outlooks.get(job.id) != text:
            self._jobs.set_outlook(job.id, text)
            self._outlooks[job.id] = text
        if view is not None:
            kind = "late" if view.too_late else "waits" if view.spot is None and saves else "buys"
            self._jobs.announce(
                job.id, f"deadline-{kind}", "deadline", text, slack_seconds=round(view.slack)
            )
        if not saves:
            return demand
        spot = sum(one.spot for one in staying)
        after = job.spec.workers.fallback_after.total_seconds()
        return deadline.with_deadline(demand, view, after, spot)

    def _outlook(
        self,
        job: JobRecord,
        demand: JobDemand,
        staying: Sequence[Machine],
        offered: Sequence[Offer],
        now: float,
    ) -> deadline.Outlook | None:
        """Return None while the speed of the job is unknown."""
        at, total = job.deadline, self._speeds.total_samples(job)
        best = deadline.cheapest(offered, demand.rates)
        pools = self._clearance.specs(demand.pools)
        if at is None or total is None or best is None or not pools:
            return None
        spare = deadline.END_PART * (at - job.created_at)
        room = sum(float("inf") if p.max_machines is None else p.max_machines for p in pools)
        places = max(1, int(min(demand.maximum, room)))
        rest = max(0, total - job.samples[0]) / best[1]
        boots = ((pool.provider, pool.boot_seconds) for pool in pools)
        delay = deadline.delay_of(boots, self._speeds.workload(job).start_seconds)
        ages = deadline.ages_on_demand(staying, now)
        return deadline.outlook(at - spare - now, rest / places, places, delay, ages, spare)

    def unpaid(self, jobs: Sequence[JobRecord]) -> dict[str, str]:
        """Return the machines whose payer has a budget and no longer uses machines, with why."""
        active = {job.id: job for job in jobs}
        reasons: dict[str, str] = {}
        paid = self._costs.paid
        self._ended = {payer: job for payer, job in self._ended.items() if payer in paid}
        for payer, machines in paid.items():
            job = active.get(payer) or self._inactive(payer)
            if job is None or job.state in WITH_MACHINES:
                continue
            if job.spec.stop.max_cost_usd or self._months_of(job):
                reasons |= dict.fromkeys(machines, f"{payer} has a budget and is {job.state}")
        return reasons

    def _budget(
        self,
        job: JobRecord,
        own: Sequence[Machine],
        limits: Limits,
        least: float,
        now: float,
    ) -> tuple[float | None, str | None]:
        """Return the USD that the job can still commit, and why it must be paused.

        ``own``: the machines that it pays for. ``least``: the cost of the cheapest machine. A job
        that can't pay it would wait forever.
        """
        budgets, committed = self._months_of(job), commitment(own, limits, now)
        if (usd := job.spec.stop.max_cost_usd) is not None:
            spent = self._costs.spent(job.id, now)
            remedy = "resume it with a larger budget"
            budgets.insert(0, Budget("stop.max_cost_usd", usd, spent, committed, remedy))
        if not budgets:
            return None, None
        reasons = (each.pause_reason(committed, 0.0 if own else least) for each in budgets)
        return min(each.affordable for each in budgets), next(filter(None, reasons), None)

    def _inactive(self, job: str) -> JobRecord | None:
        """Return an ended job, whose state can't change any more."""
        if job not in self._ended:
            try:
                self._ended[job] = self._jobs.get(job)
            except (NotFound, JobUnreadable):
                self._ended[job] = None
        return self._ended[job]


def owner_limits(jobs: Iterable[JobRecord], tokens: Mapping[str, ApiToken]) -> dict[str, int]:
    """Return the most machines of all jobs of a user together, for users with a limit.

    It is that of the user's token. If the token was revoked, the limit at the time of submission
    continues, the lowest one if it was different for each job.
    """
    limits: dict[str, int] = {}
    for job in jobs:
        token = tokens.get(job.owner or "")
        limit = job.owner_limit if token is None else token.max_machines
        if job.owner is not None and limit is not None:
            limits[job.owner] = min(limit, limits.get(job.owner, limit))
    return limits


def _work_items(job: JobRecord, work: Mapping[str, int]) -> int:
    if "total" not in work:
        return job.spec.workers.max  # Unknown until a worker has read the data.
    left = work["total"] - work["finished"] * work["per_epoch"]
    # The evaluation of the last epoch follows its last subtask.
    return max(1, left)


def _no_pool(job: JobRecord, wanted: Collection[str], pools: Collection[str]) -> str:
    names = ", ".join(wanted)
    if set(pools) & set(wanted):
        labels = ", ".join(job.spec.required_labels)
        return f"workers.pools: none of {names} may see data labelled {labels}"
    return f"workers.pools: there is no pool {names}; known: {', '.join(pools)}"


def _least_cost(limits: Limits, offers: Iterable[Offer]) -> float:
    """Return the USD that the cheapest machine costs at least."""
    prices = [price_of(each, spot=each.spot) for each in offers]
    seconds = max(limits.billing_seconds, limits.exit_seconds)
    return min(prices, default=0.0) * seconds / 3600
