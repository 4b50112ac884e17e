"""Decision of what ends, the order of all actions, and why jobs wait."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vcasgd.fleet.observed import JobDemand, Observed
from vcasgd.fleet.plan import Blame, Launch, StartWorker, StopWorker, Terminate
from vcasgd.fleet.plan.allocation import Allocation
from vcasgd.schemas.fleet import Machine
from vcasgd.spec.hardware import suits

#: Reason for ending a machine that never came into the cluster.
NOT_JOINED = "did not join in time"
#: Why a job waits for machines of other jobs, in the singular and the plural.
_HIGHER = "higher-priority job has machines", "higher-priority jobs have machines"
_EQUAL = "job of the same priority has machines", "jobs of the same priority have machines"
_LOWER = "lower-priority job keeps its minimum", "lower-priority jobs keep their minimum"
_GIVING = "lower-priority job gives up machines soon", "lower-priority jobs give up machines soon"
#: Prefix of the boot error that a machine reports.
BOOT_FAILED = "did not boot: "


@dataclass(frozen=True)
class Waiting:
    """Why a job has fewer machines than it could use, as text for people.

    ``position``, from 1 to ``length``, is its place among the jobs that wait for machines, in the
    order in which they get the next ones; 0 if only a limit of its user keeps it waiting.
    """

    text: str
    position: int = 0
    length: int = 0
    has_machines: bool = True
    """True if it has, or is about to get, some of its machines."""


@dataclass(frozen=True)
class Plan:
    """Actions of a round, and why jobs have fewer machines than they could use.

    Carry them out in this order: then carrying out only a part does no harm.
    """

    stops: list[StopWorker]
    ends: list[Terminate]
    blames: list[Blame]
    starts: list[StartWorker]
    launches: list[Launch]
    waiting: dict[str, Waiting]


def make_plan(state: Observed, now: float) -> Plan:
    """Return the plan for ``now`` (Unix seconds), given a state with a current history."""
    failed = _failed(state, now)
    blames = _blames(state, failed)
    allocation = Allocation(state, failed, blames, now)
    stops = [
        *_stop_unwanted(state),
        *allocation.handovers,
        *allocation.moves(),
        *allocation.surplus(),
        *allocation.dear(),
    ]
    ends = [Terminate(id_, reason) for id_, reason in failed.items()]
    ends += allocation.terminations()
    launches = allocation.launches()
    waiting = _waiting(state, allocation.missing(), launches)
    return Plan(stops, ends, blames, allocation.starts, launches, waiting)


def _failed(state: Observed, now: float) -> dict[str, str]:
    """Return machines that failed or must not continue, with the reasons."""
    failed = _barred(state)
    boot_seconds = {pool.name: pool.boot_seconds for pool in state.pools}
    for one in state.staying():
        # A new worker on the same machine would be rejected again.
        if one.id in state.quarantined:
            failed.setdefault(one.id, "its worker is in quarantine")
        elif why := _lost(state, one, boot_seconds.get(one.pool), now):
            failed.setdefault(one.id, why)
    return failed


def _barred(state: Observed) -> dict[str, str]:
    """Return machines whose pool may no longer see the data that they hold, even if only cached."""
    barred = {job.job: job.barred for job in state.jobs}
    holds = dict(state.payers)
    holds |= {worker.machine_id: worker.job for worker in state.workers if worker.alive}
    return {
        one.id: f"pool {one.pool} may not see the data of {holds[one.id]}"
        for one in state.machines
        if one.id not in state.ending and one.pool in barred.get(holds.get(one.id, ""), frozenset())
    }


def _lost(state: Observed, one: Machine, boot_seconds: float | None, now: float) -> str | None:
    history, limits = state.history, state.limits
    if one.id not in history.joined and one.id in state.boot_errors:
        return f"{BOOT_FAILED}{state.boot_errors[one.id]}"
    if one.id in history.joined:
        gone = now - history.joined[one.id] > limits.lost_seconds
        return "it is no longer in the cluster" if gone else None
    late = now - max(one.launched_at, history.since) > (boot_seconds or limits.boot_seconds)
    return NOT_JOINED if late else None


def _blames(state: Observed, failed: dict[str, str]) -> list[Blame]:
    return [
        Blame(one.id, one.pool, one.zone, one.spot, failed[one.id])
        for one in state.staying()
        if failed.get(one.id, "").startswith((NOT_JOINED, BOOT_FAILED))
    ]


def _stop_unwanted(state: Observed) -> list[StopWorker]:
    running = {job.job for job in state.jobs if job.running}
    return [
        StopWorker(worker.name, "the job is not running")
        for worker in state.workers
        if worker.alive and worker.job not in running
    ]


def _waiting(
    state: Observed, missing: Mapping[str, int], launches: Sequence[Launch]
) -> dict[str, Waiting]:
    """Return why each job waits for machines: those that are ``missing``, that a limit of its user
    withholds from it, or that come. ``missing`` is in the order of the queue."""
    short = {job.job for job in state.jobs if missing.get(job.job, 0) > 0 or job.withheld > 0}
    coming = _coming(state, launches)
    if not short and not coming:
        return {}
    pool_of = {one.id: one.pool for one in state.staying()}
    jobs = {job.job: job for job in state.jobs}
    holders: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for worker in state.workers:
        if worker.alive and worker.machine_id in pool_of and worker.job in jobs:
            holders[pool_of[worker.machine_id]][worker.job] += 1
    queue = [name for name, places in missing.items() if places > 0]
    found = {}
    for name in sorted(short | coming.keys()):
        job, places = jobs[name], max(0, missing.get(name, 0))
        why = _why_waiting(job, places, state, jobs, holders) if name in short else ""
        position = queue.index(name) + 1 if places else 0
        if places:
            why = f"position {position} of {len(queue)}: {why}"
        # What changes soon comes first: the rest may be machines that the job can do without.
        text = "; ".join(filter(None, (coming.get(name), why)))
        length = len(queue) if places else 0
        found[name] = Waiting(text, position, length, not places or places < job.desired)
    return found


def _coming(state: Observed, launches: Sequence[Launch]) -> dict[str, str]:
    """Return that machines boot or are ordered, as text for people, by job without a worker."""
    joined = {*state.nodes, *state.history.joined}
    boots = Counter(state.payers.get(one.id) for one in state.staying() if one.id not in joined)
    orders = Counter(state.ordered) + Counter(job for each in launches for job in each.jobs)
    working = {worker.job for worker in state.workers if worker.alive}
    return {
        job.job: "; ".join(
            f"1 machine is {how}" if count == 1 else f"{count} machines are {how}"
            for how, count in (("booting", boots[job.job]), ("ordered", orders[job.job]))
            if count
        )
        for job in state.jobs
        if job.job not in working and (boots[job.job] or orders[job.job])
    }


def _why_waiting(
    job: JobDemand,
    missing: int,
    state: Observed,
    jobs: Mapping[str, JobDemand],
    holders: Mapping[str, Counter[str]],
) -> str:
    causes = _causes(job, state, jobs, holders) if missing else []
    causes += [job.limited] if job.limited else []
    other = "" if missing == job.desired else "other "
    why = "; ".join(causes) or f"no {other}machine is available"
    return f"waits for {missing + job.withheld} of {job.desired + job.withheld} machines; {why}"


def _causes(
    job: JobDemand,
    state: Observed,
    jobs: Mapping[str, JobDemand],
    holders: Mapping[str, Counter[str]],
) -> list[str]:
    """Return why the machines that the job may have can't be found."""
    names = {name for pool in job.pools for name in holders.get(pool, ())} - {job.job}
    machines = sum(holders.values(), Counter[str]())
    others = [jobs[name] for name in names]
    lower = [each for each in others if each.priority < job.priority]
    least = sum(machines[each.job] <= each.needed for each in lower)
    groups = (
        (sum(each.priority > job.priority for each in others), *_HIGHER),
        (sum(each.priority == job.priority for each in others), *_EQUAL),
        (least, *_LOWER),
        (len(lower) - least, *_GIVING),
    )
    causes = [
        f"1 {one}" if count == 1 else f"{count} {several}"
        for count, one, several in groups
        if count
    ]
    for pool in state.pools:
        if pool.name in job.pools and not suits(job.resources, pool.kinds):
            causes.append(f"{pool.name}: no machine has the resources")
        elif pool.name in job.pools and pool.reason:
            causes.append(f"{pool.name}: {pool.reason}")
    return causes
