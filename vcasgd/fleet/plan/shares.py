"""Order in which jobs get machines, by priority, waiting time, and weighted shares, and limits of
machines for each user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heapreplace
from itertools import groupby
from operator import attrgetter

from vcasgd.fleet.observed import JobDemand, Observed


class Shares:
    """Number of machines of each job in a plan, and the order that follows from it."""

    def __init__(self, jobs: Iterable[JobDemand]) -> None:
        self.machines: Counter[str] = Counter()
        self._positions = {job.job: position for position, job in enumerate(jobs)}

    def of(self, job: JobDemand, more: int = 0) -> float:
        """Return the machines for each unit of the job's weight, with some ``more`` of them."""
        return (self.machines[job.job] + more) / job.weight

    def next_to_give(self, job: JobDemand) -> tuple[int, float, int]:
        """Return a sort key: low priorities, then large shares, then the latest submission."""
        return job.priority, -self.of(job), -self._positions[job.job]

    def next_to_get(self, job: JobDemand) -> tuple[int, float, int]:
        """Return a sort key: high priorities, then small shares, then the first submission."""
        return -job.priority, self.of(job, 1), self._positions[job.job]


def by_minimum(state: Observed, now: float) -> list[JobDemand]:
    """Return the running jobs in the order in which they get their minimum.

    Each ``age_seconds`` that a job lacks a part of its minimum count as one level of priority, up
    to the highest of all jobs. Equal ones are in order of submission.
    """
    jobs = [job for job in state.jobs if job.running]
    highest = max((job.priority for job in jobs), default=0)
    since, step = state.history.needy, state.limits.age_seconds

    def rank(job: JobDemand) -> int:
        waited = now - since.get(job.job, now)
        return -min(highest, job.priority + int(waited / step))

    return sorted(jobs, key=rank)


def levels(jobs: Iterable[JobDemand]) -> list[list[JobDemand]]:
    """Return the jobs of each priority, the highest first."""
    ranked = sorted(jobs, key=attrgetter("priority"), reverse=True)
    return [list(level) for _, level in groupby(ranked, attrgetter("priority"))]


def fill_by_share(jobs: Sequence[JobDemand], place: Callable[[JobDemand, int], bool]) -> None:
    """Fill the places of jobs of one priority, each time one of the job with the smallest share.

    This is max-min fairness: no job could get another machine without taking one from a job that
    has a smaller share. ``place(job, number)`` fills a place, or returns False; then the job gets
    no further ones.
    """
    queue = [
        ((job.needed + 1) / job.weight, position, job.needed, job)
        for position, job in enumerate(jobs)
    ]
    heapify(queue)
    while queue:
        _, position, number, job = queue[0]
        if number < job.desired and place(job, number):
            heapreplace(queue, ((number + 2) / job.weight, position, number + 1, job))
        else:
            heappop(queue)


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
