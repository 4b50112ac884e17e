"""The workers that each job keeps, and those that are left over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vcasgd.fleet.observed import JobDemand, Observed, WorkerView
from vcasgd.fleet.providers.base import Instance


@dataclass
class Staff:
    """A job's workers, the ones to keep first in front."""

    on_demand: list[WorkerView] = field(default_factory=list)
    """For places that take no risk."""
    others: list[WorkerView] = field(default_factory=list)
    replaceable: list[WorkerView] = field(default_factory=list)
    dear: list[WorkerView] = field(default_factory=list)
    """On machines that cost too much; they are stopped."""

    def take(self, *, on_demand: bool) -> WorkerView | None:
        workers = self.on_demand if on_demand else self.others
        return workers.pop(0) if workers else None

    def take_replaceable(self, *, on_demand: bool) -> WorkerView | None:
        """Where no replacement is to be had."""
        if on_demand or not self.replaceable:
            return None
        return self.replaceable.pop(0)

    def all(self) -> list[WorkerView]:
        return [*self.on_demand, *self.others, *self.replaceable, *self.dear]


def divide(
    state: Observed,
    machines: Mapping[str, Instance],
    replaceable: Callable[[JobDemand, Instance], bool],
    now: float,
) -> tuple[dict[str, Staff], list[WorkerView]]:
    """Of each running job, and who is left over."""
    living = [worker for worker in state.workers if worker.alive and worker.instance_id in machines]
    living.sort(key=lambda worker: worth(machines[worker.instance_id]))
    kept: dict[str, Staff] = {}
    for job in state.jobs:
        if job.running:
            own = [worker for worker in living if worker.job == job.job]
            kept[job.job] = _staff(job, own, state, machines, replaceable, now)
    keeping = {worker.name for staff in kept.values() for worker in staff.all()}
    return kept, [worker for worker in living if worker.name not in keeping]


def _staff(
    job: JobDemand,
    own: list[WorkerView],
    state: Observed,
    machines: Mapping[str, Instance],
    replaceable: Callable[[JobDemand, Instance], bool],
    now: float,
) -> Staff:
    staff, since, limit = Staff(), state.history.dear, state.limits.dear_seconds
    firm = []
    for worker in own:
        one = machines[worker.instance_id]
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
    # a place without risk that is still empty does not cost the worker that is there instead
    staff.others = firm[: job.desired - len(staff.on_demand)]
    if len(staff.on_demand) + len(staff.others) >= job.desired:
        staff.replaceable = []
    return staff


def worth(instance: Instance) -> tuple[float, float, str]:
    """Cheap machines first, then old ones, which have survived so far."""
    return instance.price_per_hour, instance.launched_at, instance.id
