"""Reasons why jobs have fewer machines than they could use, as text for users."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from vcasgd.fleet.observed import JobDemand, Observed


def reasons(state: Observed, missing: Mapping[str, int]) -> dict[str, str]:
    """Return why each job with ``missing`` machines waits for them."""
    if not missing:
        return {}
    pool_of = {one.id: one.pool for one in state.staying()}
    jobs = {job.job: job for job in state.jobs}
    holders: defaultdict[str, set[str]] = defaultdict(set)
    for worker in state.workers:
        if worker.alive and worker.instance_id in pool_of and worker.job in jobs:
            holders[pool_of[worker.instance_id]].add(worker.job)
    return {
        name: _reason(jobs[name], count, state, jobs, holders)
        for name, count in missing.items()
        if count > 0
    }


def _reason(
    job: JobDemand,
    missing: int,
    state: Observed,
    jobs: Mapping[str, JobDemand],
    holders: Mapping[str, set[str]],
) -> str:
    names = {name for pool in job.pools for name in holders.get(pool, ())} - {job.job}
    others = [jobs[name].priority - job.priority for name in names]
    groups = {
        "of higher priority": sum(each > 0 for each in others),
        "of the same priority": sum(each == 0 for each in others),
        "of lower priority": sum(each < 0 for each in others),
    }
    causes = [f"{count} job{'s'[: count > 1]} {kind}" for kind, count in groups.items() if count]
    pools = (pool for pool in state.pools if pool.name in job.pools)
    causes += [f"{pool.name}: {pool.reason}" for pool in pools if pool.reason]
    why = ", ".join(causes) or "none is for sale"
    return f"waits for {missing} of {job.desired} machines: {why}"
