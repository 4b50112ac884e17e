"""Workers that each job keeps, and machines that other jobs can take."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vcasgd.fleet.observed import JobDemand, Observed, WorkerView
from vcasgd.fleet.providers.base import Machine

Item = TypeVar("Item")


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
        """Return all workers."""
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
    """Items on machines. Taking one costs the same however many there are.

    Machines that the cloud recommends leaving are not in stock.
    """

    def __init__(self, items: Iterable[tuple[Machine, Item]]) -> None:
        """Sort the items by the worth of their machines; equal ones keep their order."""
        self._queues: defaultdict[tuple[str, bool], deque[tuple[Machine, Item]]]
        self._queues = defaultdict(deque)
        for one, item in sorted(items, key=lambda each: worth(each[0])):
            if one.advised_at is None:
                self._queues[one.pool, one.spot].append((one, item))

    def take(
        self, pools: Sequence[str], limit: Callable[[str], float], *, on_demand: bool
    ) -> Item | None:
        """Remove and return the item on the best machine of several pools, or None.

        ``limit`` returns a pool's maximum price in USD per hour. ``on_demand`` excludes spot
        machines.
        """
        kinds = (False,) if on_demand else (True, False)
        # The head of a queue is its cheapest machine, so no other one can be below the limit.
        heads = [
            queue
            for pool in pools
            for spot in kinds
            if (queue := self._queues.get((pool, spot)))
            and queue[0][0].price_per_hour <= limit(pool)
        ]
        if not heads:
            return None
        return min(heads, key=lambda queue: worth(queue[0][0])).popleft()[1]
