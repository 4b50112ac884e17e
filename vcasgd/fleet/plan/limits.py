"""Limits of machines for each user, over all of the user's jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import replace

from vcasgd.fleet.observed import JobDemand, Observed
from vcasgd.fleet.plan.shares import by_minimum, fill_by_share, levels


def within_limits(state: Observed, now: float) -> Observed:
    """Return the state with smaller demands, so that those of each user fit the user's limit.

    A limit is divided among the user's jobs as machines are among all jobs: first the minimum of
    each, by priority, and then by priority and weight. Demands that became smaller say why.
    """
    limited = [job for job in by_minimum(state, now) if job.owner in state.owner_limits]
    left, shares = Counter(state.owner_limits), Counter[str]()

    def place(job: JobDemand, _number: int) -> bool:
        if left[job.owner or ""] <= 0:
            return False
        left[job.owner or ""] -= 1
        shares[job.job] += 1
        return True

    for job in limited:
        for number in range(job.needed):
            place(job, number)
    for level in levels(limited):
        fill_by_share(level, place)
    smaller = {
        job.job: replace(
            job,
            maximum=shares[job.job],
            limited=_reason(job, state),
            withheld=job.desired - shares[job.job],
        )
        for job in limited
        if shares[job.job] < job.desired
    }
    return replace(state, jobs=tuple(smaller.get(job.job, job) for job in state.jobs))


def _reason(job: JobDemand, state: Observed) -> str:
    limit = state.owner_limits[job.owner or ""]
    return f"all jobs of {job.owner} together may have {limit} machine{'s'[: limit != 1]}"


class OwnerRooms:
    """Machines that the jobs of each user may still get in a round.

    Workers that are surplus or leaving count until they are gone, so a user never has more machines
    than the limit because one job gets what another one has not yet given back. ``machines``: those
    that can be relied on; others are lost already and don't count.
    """

    def __init__(self, state: Observed, machines: Container[str]) -> None:
        owners = {job.job: job.owner for job in state.jobs}
        having = Counter(
            owners.get(worker.job)
            for worker in state.workers
            if worker.alive and worker.machine_id in machines
        )
        self._left = {name: limit - having[name] for name, limit in state.owner_limits.items()}

    def take(self, job: JobDemand, most: int) -> int:
        """Take room for up to ``most`` machines, and return for how many there is room."""
        if job.owner not in self._left:
            return most
        count = max(0, min(most, self._left[job.owner]))
        self._left[job.owner] -= count
        return count

    def give_back(self, job: JobDemand) -> None:
        """Give back room for one machine that was not found."""
        if job.owner in self._left:
            self._left[job.owner] += 1
