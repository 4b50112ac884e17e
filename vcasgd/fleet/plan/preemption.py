"""Preemption: takes machines of jobs above their minimum for jobs that get none otherwise."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from vcasgd.fleet.observed import JobDemand, WorkerView
from vcasgd.fleet.plan.actions import StopWorker
from vcasgd.fleet.plan.shares import Shares
from vcasgd.fleet.plan.staff import worth
from vcasgd.fleet.providers.base import Machine


@dataclass(frozen=True)
class Claim:
    """Places of a job that can't be filled by an idle, a booting, or a new machine."""

    job: JobDemand
    places: int
    on_demand: bool = False
    """True if only on-demand machines fill them."""


@dataclass(frozen=True)
class Donation:
    """Worker above its job's minimum, and its machine."""

    job: JobDemand
    worker: WorkerView
    machine: Machine


#: Returns True if a machine may be taken for a job.
Allowed = Callable[[Donation, JobDemand], bool]
#: Returns a job's maximum price in a pool, in USD per hour.
PriceLimit = Callable[[JobDemand, str], float]


class Donors:
    """Jobs that can give machines: the lowest priority first, then the largest share.

    Keeps ``shares`` up to date. The work for a machine doesn't depend on the number of machines.
    """

    def __init__(
        self,
        donations: Iterable[Donation],
        shares: Shares,
        limit: PriceLimit,
        allowed: Allowed,
    ) -> None:
        self._shares, self._limit, self._allowed = shares, limit, allowed
        self._machines: dict[str, defaultdict[tuple[str, bool], list[Donation]]] = {}
        jobs: dict[str, JobDemand] = {}
        for each in sorted(donations, key=lambda each: worth(each.machine)):
            if each.machine.advised_at is not None:
                continue
            jobs[each.job.job] = each.job
            groups = self._machines.setdefault(each.job.job, defaultdict(list))
            groups[each.machine.pool, each.machine.spot].append(each)
        self._queue = [(shares.next_to_give(job), job) for job in jobs.values()]
        heapify(self._queue)

    def take(self, claim: Claim, worthwhile: Callable[[JobDemand], bool]) -> Donation | None:
        """Remove and return the dearest suitable machine of the first donor that has one, or None.

        If a donor is not ``worthwhile``, all later ones aren't either.
        """
        passed = []
        taken = None
        while self._queue and worthwhile(donor := self._queue[0][-1]):
            taken = self._take_from(donor.job, claim)
            if taken is not None:
                self._shares.machines[donor.job] -= 1
                heapreplace(self._queue, (self._shares.next_to_give(donor), donor))
                break
            passed.append(heappop(self._queue))
        for each in passed:
            heappush(self._queue, each)
        return taken

    def _take_from(self, donor: str, claim: Claim) -> Donation | None:
        groups, best = self._machines[donor], None
        for pool in claim.job.pools:
            for spot in (False,) if claim.on_demand else (True, False):
                group = groups.get((pool, spot))
                index = self._dearest(group, claim.job, pool) if group else None
                if group and index is not None:
                    key = worth(group[index].machine)
                    best = max(best, (key, group, index)) if best else (key, group, index)
        return best[1].pop(best[2]) if best else None

    def _dearest(self, group: list[Donation], job: JobDemand, pool: str) -> int | None:
        limit = self._limit(job, pool)
        affordable = bisect_right(group, limit, key=lambda each: each.machine.price_per_hour)
        indices = (at for at in reversed(range(affordable)) if self._allowed(group[at], job))
        return next(indices, None)


def preempt_for_minimum(claims: Iterable[Claim], donors: Donors) -> list[StopWorker]:
    """Return one stop for each place of a minimum for which there is a machine."""
    stops = []
    for claim in claims:
        for _ in range(claim.places):
            donation = donors.take(claim, lambda _: True)
            if donation is None:
                break
            stops.append(_stop(donation, claim.job, "which lacks a part of its minimum"))
    return stops


def preempt_for_share(claims: Iterable[Claim], donors: Donors, shares: Shares) -> list[StopWorker]:
    """Return the stops that higher priorities, and smaller shares of the same one, justify.

    Between jobs of the same priority, a machine only moves if the job that gets it still has a
    smaller share than the other one had, so it never moves back.
    """
    stops = []
    queue = [(shares.next_to_get(claim.job), claim.places, claim) for claim in claims]
    heapify(queue)
    while queue:
        _, places, claim = queue[0]
        donation = donors.take(claim, _worthwhile(claim.job, shares)) if places else None
        if donation is None:
            heappop(queue)
            continue
        higher = claim.job.priority > donation.job.priority
        why = "which has a higher priority" if higher else "which has less than its share"
        stops.append(_stop(donation, claim.job, why))
        shares.machines[claim.job.job] += 1
        heapreplace(queue, (shares.next_to_get(claim.job), places - 1, claim))
    return stops


def _worthwhile(job: JobDemand, shares: Shares) -> Callable[[JobDemand], bool]:
    after = shares.of(job, 1)
    return lambda donor: (
        job.priority > donor.priority
        or (job.priority == donor.priority and after < shares.of(donor))
    )


def _stop(donation: Donation, job: JobDemand, why: str) -> StopWorker:
    reason = f"its machine is reassigned to {job.job}, {why}"
    return StopWorker(donation.worker.name, reason, successor=job.job)
