"""Order in which jobs get machines: by priority, waiting time, and weighted shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
