"""What jobs ask for, within their budgets and their labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vcasgd.fleet.budget import FIELD, affordable, commitment, pause_reason
from vcasgd.fleet.observed import JobDemand
from vcasgd.fleet.plan.prices import price_of
from vcasgd.fleet.providers.base import Instance, Offer
from vcasgd.runtime.controller.parts import Parts
from vcasgd.store.jobs import Job, State

#: in which a job has machines
AT_WORK = (State.STARTING, State.RUNNING)


class Demands:
    """Of all active jobs, one look at a time."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._jobs = parts.jobs

    def of(
        self, job: Job, machines: Sequence[Instance], offers: Mapping[str, Sequence[Offer]],
        now: float,
    ) -> JobDemand:  # fmt: skip
        """Pauses the job first, if its budget says so."""
        workers, budget = job.spec.workers, job.spec.stop.max_cost_usd
        pools, barred = self._parts.guard.divide(job)
        left = None
        state, broke = job.state, job.state is State.PAUSED and (job.reason or "").startswith(FIELD)
        if budget is not None:
            own = self._parts.books.paid_by(job.id, machines)
            spent = self._parts.books.spent(job.id, now)
            committed = commitment(own, self._parts.limits, now)
            left = affordable(budget, spent, committed)
            why = pause_reason(budget, spent, committed)
            if why is None and not own:
                # what is left has to pay for a machine, or the job would wait for ever
                least = self._least(pools, offers)
                why = pause_reason(budget, spent, least, "the least that a machine costs")
            if why and state in AT_WORK:
                self._jobs.transition(job.id, State.PAUSED, AT_WORK, why=why)
                state, broke = State.PAUSED, True
        return JobDemand(
            job=job.id,
            minimum=workers.min,
            maximum=workers.max,
            pools=pools,
            wants=self._wants(job),
            running=state in AT_WORK,
            barred=barred,
            on_demand_minimum=workers.on_demand_min,
            fallback_after=workers.fallback_after.total_seconds() if workers.fallback else None,
            max_price=workers.max_price_per_hour,
            affordable=left,
            broke=broke,
            rates=self._parts.speeds.rates(job),
        )

    def _wants(self, job: Job) -> int:
        work = self._jobs.work(job.id)
        left = work["total"] - work["finished"] * work["per_epoch"]
        # after the last epoch there is its evaluation still to do
        return max(1, left)

    def _least(self, pools: Sequence[str], offers: Mapping[str, Sequence[Offer]]) -> float:
        """USD that the cheapest machine costs at least."""
        prices = [price_of(each, spot=each.spot) for pool in pools for each in offers.get(pool, ())]
        seconds = max(self._parts.limits.billing_seconds, self._parts.limits.exit_seconds)
        return min(prices, default=0.0) * seconds / 3600
