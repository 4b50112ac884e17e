"""What jobs ask for, within their budgets and their labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vcasgd.controller.fleet.context import ControllerContext
from vcasgd.errors import JobUnreadable, NotFound
from vcasgd.fleet.budget import affordable, commitment, pause_reason
from vcasgd.fleet.observed import JobDemand, Limits
from vcasgd.fleet.plan.prices import price_of
from vcasgd.fleet.providers.base import Instance, Offer
from vcasgd.store.ledger.job import JobRecord, JobState

#: in which a job has machines
AT_WORK = (JobState.STARTING, JobState.RUNNING)


class Demands:
    """Of all active jobs, one look at a time."""

    def __init__(self, parts: ControllerContext) -> None:
        self._parts = parts
        self._jobs = parts.jobs
        self._ended: dict[str, JobRecord | None] = {}

    def of(
        self,
        job: JobRecord,
        machines: Sequence[Instance],
        offers: Mapping[str, Sequence[Offer]],
        now: float,
    ) -> JobDemand:
        """Pauses the job first, if its budget says so. ``machines``: also those that were granted
        and are not listed yet."""
        workers = job.spec.workers
        pools, barred = self._parts.guard.divide(job)
        left, why = self._budget(job, machines, _least(self._parts.limits, pools, offers), now)
        at_work = job.state in AT_WORK
        if at_work and why:
            self._jobs.transition(job.id, JobState.PAUSED, AT_WORK, why=why)
        return JobDemand(
            job=job.id,
            minimum=workers.min,
            maximum=workers.max,
            pools=pools,
            wants=self._wants(job),
            running=at_work and not why,
            barred=barred,
            on_demand_minimum=workers.on_demand_min,
            fallback_after=workers.fallback_after.total_seconds() if workers.fallback else None,
            max_price=workers.max_price_per_hour,
            affordable=left,
            rates=self._parts.speeds.rates(job),
            learners=job.spec.tuning.learners_per_machine,
        )

    def _budget(
        self, job: JobRecord, machines: Sequence[Instance], least: float, now: float
    ) -> tuple[float | None, str | None]:
        """USD that may still be promised, and why the job has to rest. ``least``: what a machine
        costs at least; a job that can't pay that would wait for ever."""
        budget = job.spec.stop.max_cost_usd
        if budget is None:
            return None, None
        own = self._parts.books.paid_by(job.id, machines)
        spent = self._parts.books.spent(job.id, now)
        committed = commitment(own, self._parts.limits, now)
        why = pause_reason(budget, spent, committed)
        if why is None and not own:
            why = pause_reason(budget, spent, least, "the least that a machine costs")
        return affordable(budget, spent, committed), why

    def unpaid(self, jobs: Sequence[JobRecord]) -> dict[str, str]:
        """Machines whose payer has a budget and is not at work, and why it pays no longer."""
        known = {job.id: job for job in jobs}
        found = {}
        for machine, payer in self._parts.books.payers.items():
            job = known.get(payer) or self._over(payer)
            if job is not None and job.spec.stop.max_cost_usd and job.state not in AT_WORK:
                found[machine] = f"{payer} has a budget and is {job.state}"
        return found

    def _over(self, job: str) -> JobRecord | None:
        """One that is not active; what it was does not change any more."""
        if job not in self._ended:
            try:
                self._ended[job] = self._jobs.get(job)
            except (NotFound, JobUnreadable):
                self._ended[job] = None
        return self._ended[job]

    def _wants(self, job: JobRecord) -> int:
        work = self._jobs.work(job.id)
        left = work["total"] - work["finished"] * work["per_epoch"]
        # after the last epoch there is its evaluation still to do
        return max(1, left)


def _least(limits: Limits, pools: Sequence[str], offers: Mapping[str, Sequence[Offer]]) -> float:
    """USD that the cheapest machine costs at least."""
    prices = [price_of(each, spot=each.spot) for pool in pools for each in offers.get(pool, ())]
    seconds = max(limits.billing_seconds, limits.exit_seconds)
    return min(prices, default=0.0) * seconds / 3600
