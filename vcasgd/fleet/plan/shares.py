"""Order in which jobs get machines, limits of each user, and which machines jobs keep or give.

The order is by priority, waiting time, and weighted shares.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, heapreplace
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Generic, TypeVar

from vcasgd.fleet.observed import JobDemand, Observed, WorkerView
from vcasgd.fleet.plan import StopWorker
from vcasgd.schemas.fleet import Machine
from vcasgd.spec.hardware import Hardware


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


# -- machines that jobs keep or give ---------------------------------------------------------------

Item = TypeVar("Item")

#: Values of ``spot`` of machines that a place accepts.
ANY, ON_DEMAND, SPOT = (True, False), (False,), (True,)
#: Returns what a machine has; None for all machines if no job asks for anything.
KindOf = Callable[[Machine], Hardware | None]


@dataclass
class Staff:
    """Workers of a job, in order of preference."""

    on_demand: deque[WorkerView] = field(default_factory=deque)
    """On on-demand machines, for the on-demand minimum."""
    others: deque[WorkerView] = field(default_factory=deque)
    replaceable: deque[WorkerView] = field(default_factory=deque)
    dear: list[WorkerView] = field(default_factory=list)
    """On machines that are too expensive; they are stopped."""

    def take(self, *, on_demand: bool) -> WorkerView | None:
        """Remove and return the best worker of a kind, or None."""
        workers = self.on_demand if on_demand else self.others
        return workers.popleft() if workers else None

    def take_replaceable(self, *, on_demand: bool) -> WorkerView | None:
        """Remove and return a replaceable worker, or None; used if no replacement is available."""
        if on_demand or not self.replaceable:
            return None
        return self.replaceable.popleft()

    def all(self) -> list[WorkerView]:
        return [*self.on_demand, *self.others, *self.replaceable, *self.dear]


def divide(
    state: Observed,
    machines: Mapping[str, Machine],
    replaceable: Callable[[JobDemand, Machine], bool],
    now: float,
) -> tuple[dict[str, Staff], list[WorkerView]]:
    """Return the staff of each running job, and the spare workers.

    Workers that were asked to leave are in neither.
    """
    living = [
        worker
        for worker in state.workers
        if worker.alive and worker.machine_id in machines and worker.name not in state.draining
    ]
    living.sort(key=lambda worker: worth(machines[worker.machine_id]))
    of_job: defaultdict[str, list[WorkerView]] = defaultdict(list)
    for worker in living:
        of_job[worker.job].append(worker)
    kept = {
        job.job: _staff(job, of_job[job.job], state, machines, replaceable, now)
        for job in state.jobs
        if job.running
    }
    keeping = {worker.name for staff in kept.values() for worker in staff.all()}
    return kept, [worker for worker in living if worker.name not in keeping]


def _staff(
    job: JobDemand,
    own: list[WorkerView],
    state: Observed,
    machines: Mapping[str, Machine],
    replaceable: Callable[[JobDemand, Machine], bool],
    now: float,
) -> Staff:
    staff, since, limit = Staff(), state.history.dear, state.limits.dear_seconds
    firm = []
    for worker in own:
        one = machines[worker.machine_id]
        if now - since.get(one.id, now) >= limit:
            staff.dear.append(worker)
        elif not one.spot and len(staff.on_demand) < min(job.on_demand_minimum, job.desired):
            if one.advised_at is None:
                staff.on_demand.append(worker)
            else:
                staff.replaceable.append(worker)
        elif replaceable(job, one):
            staff.replaceable.append(worker)
        else:
            firm.append(worker)
    # An unfilled on-demand place doesn't displace the worker that has it for now.
    staff.others = deque(firm[: job.desired - len(staff.on_demand)])
    if len(staff.on_demand) + len(staff.others) >= job.desired:
        staff.replaceable = deque()
    return staff


def worth(machine: Machine) -> tuple[float, float, str]:
    """Return a sort key: cheap machines first, then old ones, which have survived so far."""
    return machine.price_per_hour, machine.launched_at, machine.id


class Stock(Generic[Item]):
    """Items on machines. Taking one costs the same however many of a kind there are.

    Machines that the cloud recommends leaving are not in stock.
    """

    def __init__(self, items: Iterable[tuple[Machine, Item]], kind_of: KindOf) -> None:
        """Sort the items by the worth of their machines; equal ones keep their order."""
        self._queues: defaultdict[
            tuple[str, bool], defaultdict[Hardware | None, deque[tuple[Machine, Item]]]
        ]
        self._queues = defaultdict(lambda: defaultdict(deque))
        for one, item in sorted(items, key=lambda each: worth(each[0])):
            if one.advised_at is None:
                self._queues[one.pool, one.spot][kind_of(one)].append((one, item))

    def take(
        self,
        pools: Sequence[str],
        limit: Callable[[str, Hardware | None], float],
        spots: Sequence[bool] = ANY,
    ) -> Item | None:
        """Remove and return the item on the best machine of several pools, or None.

        ``limit`` returns the maximum price of a pool's machines of a kind, in USD per hour.
        ``spots``: whether the machine may be spot, on demand, or both.
        """
        # The head of a queue is its cheapest machine, so no other one can be below the limit.
        heads = [
            queue
            for pool in pools
            for spot in spots
            if (pool, spot) in self._queues
            for kind, queue in self._queues[pool, spot].items()
            if queue and queue[0][0].price_per_hour <= limit(pool, kind)
        ]
        if not heads:
            return None
        return min(heads, key=lambda queue: worth(queue[0][0])).popleft()[1]


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
#: Returns a job's maximum price for machines of a kind in a pool, in USD per hour.
PriceLimit = Callable[[JobDemand, str, Hardware | None], float]


class Donors:
    """Jobs that can give machines: the lowest priority first, then the largest share.

    Keeps ``shares`` up to date. The work for a machine doesn't depend on the number of machines.
    """

    def __init__(
        self,
        donations: Iterable[Donation],
        shares: Shares,
        limit: PriceLimit,
        kind_of: KindOf,
        allowed: Allowed = lambda *_: True,
    ) -> None:
        self._shares, self._limit, self._allowed = shares, limit, allowed
        self._machines: dict[
            str, defaultdict[tuple[str, bool], dict[Hardware | None, list[Donation]]]
        ] = {}
        jobs: dict[str, JobDemand] = {}
        for each in sorted(donations, key=lambda each: worth(each.machine)):
            if each.machine.advised_at is not None:
                continue
            jobs[each.job.job] = each.job
            groups = self._machines.setdefault(each.job.job, defaultdict(dict))
            kinds = groups[each.machine.pool, each.machine.spot]
            kinds.setdefault(kind_of(each.machine), []).append(each)
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
        groups = self._machines[donor]
        best: tuple[tuple[float, float, str], list[Donation], int] | None = None
        for pool in claim.job.pools:
            for spot in (False,) if claim.on_demand else (True, False):
                for kind, group in groups.get((pool, spot), {}).items():
                    index = self._dearest(group, self._limit(claim.job, pool, kind), claim.job)
                    if index is not None:
                        found = worth(group[index].machine), group, index
                        best = max(best, found, key=itemgetter(0)) if best else found
        return best[1].pop(best[2]) if best else None

    def _dearest(self, group: list[Donation], limit: float, job: JobDemand) -> int | None:
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
