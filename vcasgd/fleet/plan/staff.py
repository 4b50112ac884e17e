"""Division of workers into those that each job keeps and the spare ones."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vcasgd.fleet.observed import JobDemand, Observed, WorkerView
from vcasgd.fleet.providers.base import Machine


@dataclass
class Staff:
    """Workers of a job, in order of preference."""

    firm: deque[WorkerView] = field(default_factory=deque)
    replaceable: deque[WorkerView] = field(default_factory=deque)
    dear: list[WorkerView] = field(default_factory=list)
    """On machines that are too expensive; they are stopped."""

    def all(self) -> list[WorkerView]:
        """Return all workers."""
        return [*self.firm, *self.replaceable, *self.dear]


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
        elif replaceable(job, one):
            staff.replaceable.append(worker)
        else:
            firm.append(worker)
    staff.firm = deque(firm[: job.desired])
    if len(staff.firm) >= job.desired:
        staff.replaceable = deque()
    return staff


def worth(machine: Machine) -> tuple[float, float, str]:
    """Return a sort key: cheap machines first, then old ones, which have survived so far."""
    return machine.price_per_hour, machine.launched_at, machine.id
