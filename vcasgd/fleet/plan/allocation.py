"""Allocation of machines: fills the places of all jobs one by one, by priority."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import groupby, islice

from vcasgd.fleet.observed import JobDemand, Observed, WorkerView, highest_price
from vcasgd.fleet.plan.actions import Blame, Launch, StartWorker, StopWorker, Terminate
from vcasgd.fleet.plan.market import Markets
from vcasgd.fleet.plan.staff import Staff, divide
from vcasgd.fleet.plan.stock import Stock
from vcasgd.fleet.providers.base import Instance


class Allocation:
    """Allocation of one round. ``failed`` has the machines that end in it, with reasons."""

    def __init__(
        self, state: Observed, failed: dict[str, str], blames: Sequence[Blame], now: float
    ) -> None:
        self._state = state
        self._now = now
        self._machines = {one.id: one for one in state.staying() if one.id not in failed}
        self._pools = {pool.name: pool for pool in state.pools}
        self._markets = Markets(state, [(b.pool, b.zone, b.spot) for b in blames], now)
        self._sells_spot: dict[str, bool] = {}
        self._staff: dict[str, Staff]
        self._staff, spare = divide(state, self._machines, self._replaceable, now)
        self._spare = {worker.name: worker for worker in spare}
        self._spare_stock = Stock((self._machines[one.instance_id], one.name) for one in spare)
        self._idle = {one.id: one for one in self._idle_machines()}
        self._idle_stock = Stock((one, one.id) for one in self._idle.values())
        self._coming = self._coming_machines()
        self._beyond_minimum: list[tuple[JobDemand, WorkerView]] = []
        self._unmet: list[JobDemand] = []
        self.starts: list[StartWorker] = []
        self.handovers: list[StopWorker] = []
        self._fill()

    # -- results -------------------------------------------------------------------------------

    def surplus(self) -> list[StopWorker]:
        """Return stops of workers that neither their job nor another one needs."""
        since, limit = self._state.history.surplus, self._state.limits.surplus_seconds
        return [
            StopWorker(worker.name, "no work for it")
            for worker in self._spare.values()
            if worker.job in self._staff and self._now - since.get(worker.job, self._now) >= limit
        ]

    def dear(self) -> list[StopWorker]:
        """Return stops of workers whose machines have exceeded their maximum price for too long."""
        return [
            StopWorker(worker.name, "its machine costs more than max_price_per_hour")
            for staff in self._staff.values()
            for worker in staff.dear
        ]

    def moves(self) -> list[StopWorker]:
        """Return one stop per unmet minimum, of workers of the latest jobs above their minimum."""
        donors = dict(enumerate(worker for _, worker in reversed(self._beyond_minimum)))
        moves: list[StopWorker] = []
        for needy, places in groupby(self._unmet):
            fitting = (
                number
                for number, donor in donors.items()
                if self._fits(needy, self._machines[donor.instance_id])
            )
            chosen = list(islice(fitting, len(list(places))))
            moves += [_reassign(donors.pop(number), needy) for number in chosen]
        return moves

    def terminations(self) -> list[Terminate]:
        """Return the machines to end that have no worker."""
        return [
            Terminate(one.id, reason)
            for one in (*self._idle.values(), *self._unneeded_booting())
            if (reason := self._why_end(one)) is not None
        ]

    def launches(self) -> list[Launch]:
        """Return the launches of this round."""
        return self._markets.launches()

    def _why_end(self, one: Instance) -> str | None:
        if one.id in self._coming_ids or one.id in self._state.unpaid:
            return self._state.unpaid.get(one.id)
        if one.advised_at is not None:
            return "the cloud recommends leaving it"
        since = self._state.history.idle.get(one.id, self._now)
        return "idle" if self._now - since > self._state.limits.idle_seconds else None

    # -- filling places ------------------------------------------------------------------------

    def _fill(self) -> None:
        jobs = [job for job in self._state.jobs if job.running]
        for job in jobs:
            on_demand = min(job.on_demand_minimum, job.needed)
            filled = self._places(job, range(on_demand), beyond=False)
            filled += self._places(job, range(on_demand, job.needed), beyond=False)
            self._unmet += [job] * (job.needed - filled)
        for job in jobs:
            self._places(job, range(job.needed, job.desired), beyond=True)

    def _places(self, job: JobDemand, numbers: range, *, beyond: bool) -> int:
        """Fill places of one job until one stays empty, as all others of its kind then would.

        Returns how many are filled.
        """
        for number in numbers:
            if not self._place(job, number, beyond=beyond):
                return number - numbers.start
        return len(numbers)

    def _place(self, job: JobDemand, number: int, *, beyond: bool) -> bool:
        """Fill one place. A job's first places are its on-demand minimum."""
        on_demand = number < job.on_demand_minimum
        staff = self._staff[job.job]
        worker = staff.take(on_demand=on_demand)
        if worker is None and self._find(job, on_demand=on_demand, beyond=beyond):
            return True
        worker = worker or staff.take_replaceable(on_demand=on_demand)
        if worker is None:
            return False
        if beyond:
            self._beyond_minimum.append((job, worker))
        return True

    def _find(self, job: JobDemand, *, on_demand: bool, beyond: bool) -> bool:
        return (
            self._reuse(job, on_demand)
            or self._take_over(job, on_demand)
            or self._await(job, on_demand)
            or self._markets.buy(job, on_demand=on_demand, last_resort=not beyond)
        )

    def _reuse(self, job: JobDemand, on_demand: bool) -> bool:
        for pool in job.pools:
            chosen = self._idle_stock.take((pool,), self._limit(job), on_demand=on_demand)
            if chosen is not None:
                del self._idle[chosen]
                self.starts.append(StartWorker(chosen, job.job))
                return True
        return False

    def _take_over(self, job: JobDemand, on_demand: bool) -> bool:
        chosen = self._spare_stock.take(job.pools, self._limit(job), on_demand=on_demand)
        if chosen is None:
            return False
        worker = self._spare.pop(chosen)
        if worker.job in self._staff:  # Workers of other jobs are stopped anyway.
            self.handovers.append(_reassign(worker, job))
        return True

    def _await(self, job: JobDemand, on_demand: bool) -> bool:
        for pool in job.pools:
            for spot in (False,) if on_demand else (True, False):
                if self._coming[pool, spot]:
                    self._coming[pool, spot].popleft()
                    return True
        return False

    def _fits(self, job: JobDemand, one: Instance) -> bool:
        return (
            one.pool in job.pools
            and one.advised_at is None
            and one.price_per_hour <= self._limit(job)(one.pool)
        )

    def _limit(self, job: JobDemand) -> Callable[[str], float]:
        return lambda pool: highest_price(self._pools.get(pool), job)

    def _replaceable(self, job: JobDemand, one: Instance) -> bool:
        """Return True if another machine should replace it when one is available."""
        if one.advised_at is not None:
            return True
        # In a pool of on-demand machines, none is a fallback.
        pool = self._pools.get(one.pool)
        bought_as_fallback = not one.spot and pool is not None and pool.spot
        if not bought_as_fallback or job.fallback_after is None:
            return False
        if job.job not in self._sells_spot:
            self._sells_spot[job.job] = self._markets.sells_spot(job)
        return self._sells_spot[job.job]

    # -- machines without a worker -------------------------------------------------------------

    def _busy(self) -> set[str]:
        return {worker.instance_id for worker in self._state.workers if worker.alive}

    def _idle_machines(self) -> list[Instance]:
        nodes = self._state.nodes or frozenset()
        free = nodes - self._busy()
        return [one for one in self._machines.values() if one.id in free]

    def _coming_machines(self) -> defaultdict[tuple[str, bool], deque[str]]:
        """Return, by pool and kind, the ids of machines that will soon be idle.

        The id is empty for machines that are not listed yet.
        """
        joined = self._busy() | (self._state.nodes or frozenset())
        coming: defaultdict[tuple[str, bool], deque[str]] = defaultdict(deque)
        for one in self._machines.values():
            if one.id not in joined:
                coming[one.pool, one.spot].append(one.id)
        self._coming_ids = {id_ for ids in coming.values() for id_ in ids}
        for pool in self._state.pools:
            for spot in (True, False):
                coming[pool.name, spot] += [""] * pool.launching_of(spot=spot)
        return coming

    def _unneeded_booting(self) -> list[Instance]:
        left = {id_ for ids in self._coming.values() for id_ in ids}
        return [one for one in self._machines.values() if one.id in left]


def _reassign(worker: WorkerView, job: JobDemand) -> StopWorker:
    return StopWorker(worker.name, f"its machine is reassigned to {job.job}")
