"""Desired and actual state to actions: the controller's only opinion, without any I/O.

How machines are shared. One worker runs on one machine. First every job gets its minimum,
then every job what it desires, both in order of submission. A place is filled by, in this
order: a worker that the job has, an idle machine, the machine of a worker that another job
has too many, a machine that is booting, a launch. A machine with a notice is already lost,
so its replacement is ordered at the notice.

Why it does not flap. Whatever is decided stays decided while nothing else changes:

* a worker is moved to another job only for that job's minimum, and only from a job that
  has more than its own, so the other can't take it back;
* a surplus (a job desires fewer workers than it has) that no other job has a use for is
  stopped after it has lasted ``surplus_seconds``; the cheapest machines, and among equals
  the oldest, are the last to go;
* a machine without a worker is kept ``idle_seconds``: a following job finds it warm;
* a machine that has not joined is given up after ``boot_seconds``, one that was joined
  after ``lost_seconds``, in which it still counts, so that a short disconnection neither
  kills nor doubles it;
* when Ray can't be reached nothing is held against any machine, and after a restart of
  the controller or of Ray all of these times begin anew;
* a pool that refused is left alone until ``blocked_until``, see :func:`backoff`.

Every action may be carried out twice. A launch has a token made from the pool's count of
launches, so one whose outcome was not recorded is repeated under the same token, and the
provider starts nothing twice.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass

from vcasgd.fleet.observed import JobDemand, Observed, WorkerView
from vcasgd.fleet.providers.base import Instance

#: beyond this many doublings any delay has reached its limit
_MOST_DOUBLINGS = 30


@dataclass(frozen=True)
class Launch:
    """Ask the pool for up to ``count`` machines."""

    pool: str
    count: int
    token: str


@dataclass(frozen=True)
class StartWorker:
    instance_id: str
    job: str


@dataclass(frozen=True)
class StopWorker:
    """Ask the worker to push what it has and to leave; its machine stays, and is promised
    to others already, so a worker that does not leave in time has to be killed."""

    name: str
    reason: str


@dataclass(frozen=True)
class Terminate:
    instance_id: str
    reason: str


Action = Launch | StartWorker | StopWorker | Terminate


def decide(state: Observed, now: float) -> list[Action]:
    """What to do at ``now`` (Unix seconds), given a state whose history is up to date.

    Stops come first and launches last, so whoever carries out only a part does no harm.
    """
    failed = _failed(state, now)
    allocation = _Allocation(state, failed, now)
    return [
        *_stop_unwanted(state),
        *allocation.handovers,
        *allocation.moves(),
        *allocation.surplus(),
        *(Terminate(id_, reason) for id_, reason in failed.items()),
        *allocation.terminations(),
        *allocation.starts,
        *allocation.launches(),
    ]


def launch_token(cluster: str, pool: str, launches: int) -> str:
    """The same for the same launch; a UUID, because that is what every cloud takes."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"vcasgd/{cluster}/{pool}/{launches}"))


def backoff(failures: int, base: float, limit: float) -> float:
    """Seconds to leave a pool alone after so many refusals in a row: base, 2·base, … limit."""
    if failures <= 0:
        return 0.0
    return float(min(limit, base * 2 ** min(failures - 1, _MOST_DOUBLINGS)))


def _failed(state: Observed, now: float) -> dict[str, str]:
    """Machines that came to nothing, and why."""
    # started again on the same machine, a worker would be sent away again
    failed = {
        one.id: "its worker is in quarantine"
        for one in state.staying()
        if one.id in state.quarantined
    }
    if state.nodes is None:
        return failed
    history, limits = state.history, state.limits
    for one in state.staying():
        if one.id in failed:
            continue
        if one.id in history.joined:
            if now - history.joined[one.id] > limits.lost_seconds:
                failed[one.id] = "its Ray node is gone"
        elif now - max(one.launched_at, history.since) > limits.boot_seconds:
            failed[one.id] = "did not join in time"
    return failed


def _stop_unwanted(state: Observed) -> list[StopWorker]:
    running = {job.job for job in state.jobs if job.running}
    return [
        StopWorker(worker.name, "the job is not running")
        for worker in state.workers
        if worker.alive and worker.job not in running
    ]


class _Allocation:
    """Who gets which machine: fills the places of all jobs, one by one, as they matter."""

    def __init__(self, state: Observed, failed: dict[str, str], now: float) -> None:
        self._state = state
        self._now = now
        self._machines = {one.id: one for one in state.staying() if one.id not in failed}
        self._workers, self._spare = self._divide_workers()
        self._idle = self._idle_machines()
        self._coming = self._coming_machines()
        self._room = self._rooms()
        self._launches: Counter[str] = Counter()
        self._beyond_minimum: list[tuple[JobDemand, WorkerView]] = []
        self._unmet: list[JobDemand] = []
        self.starts: list[StartWorker] = []
        self.handovers: list[StopWorker] = []
        self._fill()

    def surplus(self) -> list[StopWorker]:
        """Workers that are too many for their job and of no use to any other."""
        since, limit = self._state.history.surplus, self._state.limits.surplus_seconds
        return [
            StopWorker(worker.name, "no work for it")
            for worker in self._spare
            if worker.job in self._workers and self._now - since.get(worker.job, self._now) >= limit
        ]

    def moves(self) -> list[StopWorker]:
        """One worker for each unmet minimum, from the latest jobs that have more than theirs."""
        givers = list(reversed(self._beyond_minimum))
        moves = []
        for needy in self._unmet:
            for giver in givers:
                if self._machines[giver[1].instance_id].pool in needy.pools:
                    givers.remove(giver)
                    moves.append(_hand_over(giver[1], needy))
                    break
        return moves

    def terminations(self) -> list[Terminate]:
        idle, limit = self._state.history.idle, self._state.limits.idle_seconds
        return [
            Terminate(one.id, "idle")
            for one in self._idle
            if self._now - idle.get(one.id, self._now) > limit
        ]

    def launches(self) -> list[Launch]:
        cluster = self._state.cluster
        return [
            Launch(pool.name, count, launch_token(cluster, pool.name, pool.launches))
            for pool in self._state.pools
            if (count := self._launches[pool.name])
        ]

    def _fill(self) -> None:
        jobs = [job for job in self._state.jobs if job.running]
        for job in jobs:
            filled = sum(self._place(job, beyond=False) for _ in range(job.needed))
            self._unmet += [job] * (job.needed - filled)
        for job in jobs:
            for _ in range(job.desired - job.needed):
                if not self._place(job, beyond=True):
                    break

    def _place(self, job: JobDemand, *, beyond: bool) -> bool:
        if self._workers[job.job]:
            worker = self._workers[job.job].pop(0)
            if beyond:
                self._beyond_minimum.append((job, worker))
            return True
        return self._reuse(job) or self._take_over(job) or self._await(job) or self._launch(job)

    def _reuse(self, job: JobDemand) -> bool:
        fitting = [one for one in self._idle if one.pool in job.pools]
        if not fitting:
            return False
        chosen = min(fitting, key=lambda one: (job.pools.index(one.pool), _worth(one)))
        self._idle.remove(chosen)
        self.starts.append(StartWorker(chosen.id, job.job))
        return True

    def _take_over(self, job: JobDemand) -> bool:
        for worker in self._spare:
            if self._machines[worker.instance_id].pool in job.pools:
                self._spare.remove(worker)
                if worker.job in self._workers:  # all others are stopped anyway
                    self.handovers.append(_hand_over(worker, job))
                return True
        return False

    def _await(self, job: JobDemand) -> bool:
        pool = next((pool for pool in job.pools if self._coming[pool] > 0), None)
        if pool is None:
            return False
        self._coming[pool] -= 1
        return True

    def _launch(self, job: JobDemand) -> bool:
        pool = next((pool for pool in job.pools if self._room[pool] > 0), None)
        if pool is None:
            return False
        self._room[pool] -= 1
        self._launches[pool] += 1
        return True

    def _divide_workers(self) -> tuple[dict[str, list[WorkerView]], list[WorkerView]]:
        """Those that each running job keeps, and those that are left over."""
        living = [w for w in self._state.workers if w.alive and w.instance_id in self._machines]
        living.sort(key=lambda worker: _worth(self._machines[worker.instance_id]))
        kept: dict[str, list[WorkerView]] = {}
        for job in self._state.jobs:
            if job.running:
                kept[job.job] = [worker for worker in living if worker.job == job.job][
                    : job.desired
                ]
        keeping = {worker.name for workers in kept.values() for worker in workers}
        return kept, [worker for worker in living if worker.name not in keeping]

    def _busy(self) -> set[str]:
        return {worker.instance_id for worker in self._state.workers if worker.alive}

    def _idle_machines(self) -> list[Instance]:
        nodes = self._state.nodes or frozenset()
        free = nodes - self._busy()
        return [one for one in self._machines.values() if one.id in free]

    def _coming_machines(self) -> Counter[str]:
        """By pool: machines that will be idle soon, listed or not."""
        known = self._busy() | (self._state.nodes or frozenset())
        coming = Counter(one.pool for one in self._machines.values() if one.id not in known)
        coming.update({pool.name: pool.launching for pool in self._state.pools})
        return coming

    def _rooms(self) -> dict[str, float]:
        """By pool: how many machines may be asked for."""
        held = Counter(one.pool for one in self._state.staying())
        rooms: dict[str, float] = defaultdict(float)
        for pool in self._state.pools:
            if pool.blocked_until <= self._now:
                capacity = float("inf") if pool.capacity is None else pool.capacity
                rooms[pool.name] = capacity - held[pool.name] - pool.launching
        return rooms


def _hand_over(worker: WorkerView, job: JobDemand) -> StopWorker:
    return StopWorker(worker.name, f"its machine goes to {job.job}")


def _worth(instance: Instance) -> tuple[float, float, str]:
    """Cheap machines first, then old ones, which have survived so far."""
    return instance.price_per_hour, instance.launched_at, instance.id
