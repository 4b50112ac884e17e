"""Reasons why jobs have fewer machines than they could use, as text for users."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from vcasgd.fleet.observed import JobDemand, Observed


def reasons(state: Observed, missing: Mapping[str, int]) -> dict[str, str]:
    """Return why each job waits for machines: those that are ``missing``, or that a limit of its
    user withholds from it."""
    short = {job.job for job in state.jobs if missing.get(job.job, 0) > 0 or job.withheld > 0}
    if not short:
        return {}
    pool_of = {one.id: one.pool for one in state.staying()}
    jobs = {job.job: job for job in state.jobs}
    holders: defaultdict[str, set[str]] = defaultdict(set)
    for worker in state.workers:
        if worker.alive and worker.machine_id in pool_of and worker.job in jobs:
            holders[pool_of[worker.machine_id]].add(worker.job)
    return {
        name: _reason(jobs[name], max(0, missing.get(name, 0)), state, jobs, holders)
        for name in sorted(short)
    }


def _reason(
    job: JobDemand,
    missing: int,
    state: Observed,
    jobs: Mapping[str, JobDemand],
    holders: Mapping[str, set[str]],
) -> str:
    causes = _causes(job, state, jobs, holders) if missing else []
    causes += [job.limited] if job.limited else []
    why = ", ".join(causes) or "none is for sale"
    return f"waits for {missing + job.withheld} of {job.desired + job.withheld} machines: {why}"


def _causes(
    job: JobDemand,
    state: Observed,
    jobs: Mapping[str, JobDemand],
    holders: Mapping[str, set[str]],
) -> list[str]:
    """Return why the machines that the job may have can't be found."""
    names = {name for pool in job.pools for name in holders.get(pool, ())} - {job.job}
    others = [jobs[name].priority - job.priority for name in names]
    groups = {
        "of higher priority": sum(each > 0 for each in others),
        "of the same priority": sum(each == 0 for each in others),
        "of lower priority": sum(each < 0 for each in others),
    }
    causes = [f"{count} job{'s'[: count > 1]} {kind}" for kind, count in groups.items() if count]
    pools = (pool for pool in state.pools if pool.name in job.pools)
    return causes + [f"{pool.name}: {pool.reason}" for pool in pools if pool.reason]
