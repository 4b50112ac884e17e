"""Allocation of machines: fills the places of all jobs one by one, in the order of shares."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

from vcasgd.fleet.observed import JobDemand, Observed, WorkerView, highest_price
from vcasgd.fleet.plan import Blame, Launch, StartWorker, StopWorker, Terminate
from vcasgd.fleet.plan.purchases import Markets
from vcasgd.fleet.plan.shares import (
    ANY,
    ON_DEMAND,
    SPOT,
    Claim,
    Donation,
    Donors,
    OwnerRooms,
    Shares,
    Staff,
    Stock,
    by_minimum,
    divide,
    fill_by_share,
    levels,
    preempt_for_minimum,
    preempt_for_share,
)
from vcasgd.schemas.fleet import Machine
from vcasgd.spec.hardware import Hardware, suits

#: Ids of machines by pool, spot, and hardware.
Coming = defaultdict[tuple[str, bool], defaultdict[Hardware | None, deque[str]]]


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
        busy = self._busy()
        #: Pools with a spot machine that has no worker, or that is ordered.
        self._free_spot = {one.pool for one in self._machines.values()
                           if one.spot and one.id not in busy}  # fmt: skip
        self._free_spot |= {pool.name for pool in state.pools if pool.launching_of(spot=True)}
        self._hardware = hardware_by_type(state)
        self._staff: dict[str, Staff]
        self._staff, spare = divide(state, self._machines, self._replaceable, now)
        self._spare = {worker.name: worker for worker in spare}
        self._spare_stock = Stock(
            ((self._machines[one.machine_id], one.name) for one in spare), self._kind
        )
        self._idle = {one.id: one for one in self._idle_machines()}
        self._idle_stock = Stock(((one, one.id) for one in self._idle.values()), self._kind)
        vacated = (
            (self._machines[worker.machine_id], worker.machine_id)
            for worker in state.workers
            if worker.alive
            and worker.name in state.draining
            and worker.machine_id in self._machines
        )
        self._vacated_stock = Stock(vacated, self._kind)
        self._coming = self._coming_machines()
        self._shares = Shares(state.jobs)
        self._rooms = OwnerRooms(state, self._machines)
        self._lacking: Counter[str] = Counter()
        self._donations: list[Donation] = []
        self._minimum_claims: list[Claim] = []
        self._share_claims: list[Claim] = []
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
        """Return the stops of workers whose machines other jobs get.

        A part of a minimum is taken at once. Beyond it, only jobs that have waited get machines,
        and only those that have been held for a while.
        """
        by_name = {each.worker.name: each for each in self._donations}
        donors = Donors(by_name.values(), self._shares, self._highest_price, self._kind)
        stops = preempt_for_minimum(self._minimum_claims, donors)
        waiting = [claim for claim in self._share_claims if self._has_waited(claim.job)]
        if not waiting:
            return stops
        for stop in stops:
            del by_name[stop.name]
        held = [each for each in by_name.values() if self._is_held(each.worker)]
        donors = Donors(held, self._shares, self._highest_price, self._kind, self._does_not_return)
        return stops + preempt_for_share(waiting, donors, self._shares)

    def missing(self) -> Counter[str]:
        """Return the number of places that each job could not fill, in the order of the queue."""
        missing: Counter[str] = Counter()
        for claim in (*self._minimum_claims, *self._share_claims):
            missing[claim.job.job] += claim.places
        return missing

    def terminations(self) -> list[Terminate]:
        """Return the machines to end that have no worker."""
        return [
            Terminate(one.id, reason)
            for one in (*self._idle.values(), *self._unneeded_booting())
            if (reason := self._why_end(one)) is not None
        ]

    def launches(self) -> list[Launch]:
        return self._markets.launches()

    def _why_end(self, one: Machine) -> str | None:
        pool = self._pools.get(one.pool)
        if pool is not None and pool.joined:
            return None
        if one.id in self._coming_ids or one.id in self._state.unpaid:
            return self._state.unpaid.get(one.id)
        if one.advised_at is not None:
            return "the cloud recommends leaving it"
        since = self._state.history.idle.get(one.id, self._now)
        return "idle" if self._now - since > self._state.limits.idle_seconds else None

    # -- filling places ------------------------------------------------------------------------

    def _fill(self) -> None:
        jobs = by_minimum(self._state, self._now)
        for job in jobs:
            on_demand = min(job.on_demand_minimum, job.needed)
            self._fill_minimum(job, range(on_demand), on_demand=True)
            self._fill_minimum(job, range(on_demand, job.needed), on_demand=False)
        for level in levels(jobs):
            fill_by_share(level, self._place_beyond)
        # What remains can wait for losses.
        for job in jobs:
            self._keep_spares(job)

    def _fill_minimum(self, job: JobDemand, numbers: range, *, on_demand: bool) -> None:
        """Fill places until one stays empty, as all others of its kind then would."""
        filled = 0
        while filled < len(numbers) and self._place(job, numbers[filled]):
            filled += 1
        if filled < len(numbers):
            self._lacking[job.job] += len(numbers) - filled
            places = self._rooms.take(job, len(numbers) - filled)
            self._minimum_claims.append(Claim(job, places, on_demand=on_demand))

    def _place_beyond(self, job: JobDemand, number: int) -> bool:
        if self._place(job, number):
            return True
        on_demand = number < job.on_demand_minimum
        places = self._rooms.take(job, job.desired - number)
        self._share_claims.append(Claim(job, places, on_demand=on_demand))
        return False

    def _place(self, job: JobDemand, number: int) -> bool:
        """Fill one place. A job's first places are its on-demand minimum."""
        on_demand, beyond = number < job.on_demand_minimum, number >= job.needed
        staff = self._staff[job.job]
        worker = staff.take(on_demand=on_demand)
        spots = ON_DEMAND if on_demand else self._replaced_by(staff)
        if worker is None and not self._find(job, spots, last_resort=not beyond):
            worker = staff.take_replaceable(on_demand=on_demand)
            if worker is None:
                return False
        self._shares.machines[job.job] += 1
        if worker is not None and number >= job.needed + self._lacking[job.job]:
            self._donations.append(Donation(job, worker, self._machines[worker.machine_id]))
        return True

    def _replaced_by(self, staff: Staff) -> Sequence[bool]:
        """Return which machines replace the next worker that is to be replaced, if there is one."""
        if not staff.replaceable:
            return ANY
        # A machine of the fallback is not replaced by another one.
        advised = self._machines[staff.replaceable[0].machine_id].advised_at
        return SPOT if advised is None else ANY

    def _keep_spares(self, job: JobDemand) -> None:
        """Keep machines without a worker, or order them, as long as there are some."""
        kept = 0
        while kept < job.spares and self._rooms.take(job, 1):
            idle = self._idle_stock.take(job.pools, self._limit(job))
            if idle is not None:
                del self._idle[idle]
            elif not self._await(job, ANY) and not self._markets.buy(job, ANY, last_resort=False):
                self._rooms.give_back(job)
                return
            kept += 1

    def _find(self, job: JobDemand, spots: Sequence[bool], *, last_resort: bool) -> bool:
        if not self._rooms.take(job, 1):
            return False
        found = (
            self._reuse(job, spots)
            # Waits for a machine whose worker was asked to leave.
            or self._vacated_stock.take(job.pools, self._limit(job), spots) is not None
            or self._take_over(job, spots)
            or self._await(job, spots)
            or self._markets.buy(job, spots, last_resort=last_resort)
        )
        if not found:
            self._rooms.give_back(job)
        return found

    def _reuse(self, job: JobDemand, spots: Sequence[bool]) -> bool:
        for pool in job.pools:
            chosen = self._idle_stock.take((pool,), self._limit(job), spots)
            if chosen is not None:
                del self._idle[chosen]
                self.starts.append(StartWorker(chosen, job.job))
                return True
        return False

    def _take_over(self, job: JobDemand, spots: Sequence[bool]) -> bool:
        chosen = self._spare_stock.take(job.pools, self._limit(job), spots)
        if chosen is None:
            return False
        worker = self._spare.pop(chosen)
        if worker.job in self._staff:  # Workers of other jobs are stopped anyway.
            reason = f"its machine is reassigned to {job.job}"
            self.handovers.append(StopWorker(worker.name, reason))
        return True

    def _await(self, job: JobDemand, spots: Sequence[bool]) -> bool:
        for pool in job.pools:
            for spot in spots:
                for kind, coming in self._coming[pool, spot].items():
                    if coming and self._suits(job, kind):
                        coming.popleft()
                        return True
        return False

    def _limit(self, job: JobDemand) -> Callable[[str, Hardware | None], float]:
        return lambda pool, kind: self._highest_price(job, pool, kind)

    def _highest_price(self, job: JobDemand, pool: str, kind: Hardware | None) -> float:
        """Return minus infinity if machines of the kind don't suit the job."""
        suits = self._suits(job, kind)
        return highest_price(self._pools.get(pool), job) if suits else float("-inf")

    def _suits(self, job: JobDemand, kind: Hardware | None) -> bool:
        return job.resources is None or (kind is not None and suits(job.resources, (kind,)))

    def _kind(self, one: Machine) -> Hardware | None:
        """Return a machine's hardware; None for all machines if no job asks for any."""
        if self._hardware is None:
            return None
        return one.hardware or self._hardware.get((one.pool, one.machine_type))

    # -- preemption ----------------------------------------------------------------------------

    def _has_waited(self, job: JobDemand) -> bool:
        since = self._state.history.short.get(job.job, self._now)
        return self._now - since >= self._state.limits.claim_seconds

    def _is_held(self, worker: WorkerView) -> bool:
        since = self._state.history.held.get(worker.name, self._now)
        return self._now - since >= self._state.limits.hold_seconds

    def _does_not_return(self, donation: Donation, job: JobDemand) -> bool:
        """Return False if the machine was recently taken from the job that would get it."""
        donor, successor, at = self._state.history.taken.get(donation.machine.id, ("", "", 0.0))
        returns = (donor, successor) == (job.job, donation.job.job)
        return not returns or self._now - at >= self._state.limits.return_seconds

    # -- replacements --------------------------------------------------------------------------

    def _replaceable(self, job: JobDemand, one: Machine) -> bool:
        """Return True if another machine should replace it when one is available."""
        if one.advised_at is not None:
            return True
        # In a pool of on-demand machines, none is a fallback.
        pool = self._pools.get(one.pool)
        bought_as_fallback = not one.spot and pool is not None and (pool.spot or job.saves)
        if not bought_as_fallback or job.fallback_after is None:
            return False
        if job.job not in self._sells_spot:
            free = not self._free_spot.isdisjoint(job.pools)
            self._sells_spot[job.job] = free or self._markets.sells_spot(job)
        return self._sells_spot[job.job]

    # -- machines without a worker -------------------------------------------------------------

    def _busy(self) -> set[str]:
        return {worker.machine_id for worker in self._state.workers if worker.alive}

    def _idle_machines(self) -> list[Machine]:
        free = self._state.nodes - self._busy()
        return [one for one in self._machines.values() if one.id in free]

    def _coming_machines(self) -> Coming:
        """Return the ids of machines that will soon be idle.

        The id is empty for machines that are not listed yet.
        """
        joined = self._busy() | self._state.nodes
        coming: Coming = defaultdict(lambda: defaultdict(deque))
        for one in self._machines.values():
            if one.id not in joined:
                coming[one.pool, one.spot][self._kind(one)].append(one.id)
        self._coming_ids = {id_ for ids in _queues(coming) for id_ in ids}
        for pool in self._state.pools:
            known = pool.launching_kinds if self._hardware is not None else {}
            for (spot, kind), count in known.items():
                coming[pool.name, spot][kind] += [""] * count
            for spot in (True, False):
                of_kind = sum(count for (each, _), count in known.items() if each is spot)
                coming[pool.name, spot][None] += [""] * (pool.launching_of(spot=spot) - of_kind)
        return coming

    def _unneeded_booting(self) -> list[Machine]:
        left = {id_ for ids in _queues(self._coming) for id_ in ids}
        return [one for one in self._machines.values() if one.id in left]


def hardware_by_type(state: Observed) -> dict[tuple[str, str], Hardware] | None:
    """Return the hardware of each pool's types for sale; None if no job asks for any."""
    if all(job.resources is None for job in state.jobs):
        return None
    offers = (offer for pool in state.pools for offer in pool.offers or ())
    return {(offer.pool, offer.machine_type): offer.hardware for offer in offers}


def _queues(coming: Coming) -> Iterator[deque[str]]:
    return (queue for kinds in coming.values() for queue in kinds.values())
