"""The controller's part in what a job sets itself by measuring: look, decide, tell.

What holds is in the ledger, so the next controller goes on from it.
:mod:`vcasgd.learning.tuning` has the decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from vcasgd.learning.tuning import (
    factor_after,
    implicit_momentum,
    shares_by_speed,
    smoothed_momentum,
)
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.job import JobRecord, JobState
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.tuning import Tunings

#: updates over which staleness is averaged: a mean of fewer says more of their order than of the
#: job
LEAST_UPDATES = 50


class Tuner:
    """Of one job; :meth:`step` is for every now and then, and does something every ``period``
    seconds. It raises :class:`~vcasgd.errors.StoreUnavailable` and may be repeated."""

    def __init__(
        self,
        job: str,
        ledger: RedisClient,
        period: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._jobs = Jobs(ledger)
        self._tunings = Tunings(ledger, job)
        self._period = period
        self._clock = clock
        self._next = float("-inf")
        #: updates and the sum of their staleness when averaging began
        self._since: tuple[int, int] | None = None

    def step(self) -> None:
        if self._clock() < self._next:
            return
        job = self._jobs.get(self._job)
        # what a job wants never changes
        self._next = self._clock() + self._period if job.spec.tuning.of_job else float("inf")
        if job.state is not JobState.RUNNING:
            return
        tuning = job.spec.tuning
        if tuning.local_steps:
            self._tune_steps(job)
        if tuning.momentum:
            self._tune_momentum(job)
        if tuning.mixing:
            self._tune_mixing(job)

    # -- local steps ---------------------------------------------------------------------------

    def _tune_steps(self, job: JobRecord) -> None:
        beats = self._jobs.workers(job.id)
        seconds = {
            name: beat.step_seconds for name, beat in beats.items() if beat.step_seconds is not None
        }
        before = {name: share for name, share in job.tuned.shares.items() if name in beats}
        # who has not been measured yet keeps what its name had
        shares = {**before, **shares_by_speed(seconds, before)}
        if shares == job.tuned.shares:
            return
        self._tunings.tell(shares=shares)
        changed = {name: share for name, share in shares.items() if share != before.get(name, 1.0)}
        for name, share in sorted(changed.items()):
            self._jobs.event(
                job.id,
                "tuned-local-steps",
                f"{name} takes {1000 * seconds[name]:.1f} ms for a local step and makes "
                f"{share:.0%} of the push interval",
                worker=name,
                share=share,
                step_seconds=seconds[name],
            )

    # -- momentum ------------------------------------------------------------------------------

    def _tune_momentum(self, job: JobRecord) -> None:
        updates = int(job.totals.get("updates", 0))
        staleness = int(job.totals.get("staleness_sum", 0))
        # a model that was lost comes back with fewer
        if self._since is None or updates < self._since[0]:
            self._since = (updates, staleness)
        seen = updates - self._since[0]
        if seen < LEAST_UPDATES:
            return
        mean = (staleness - self._since[1]) / seen
        self._since = (updates, staleness)
        before = job.tuned.implicit_momentum
        now = smoothed_momentum(implicit_momentum(mean), before)
        if now != before:
            self._tunings.tell(implicit_momentum=now)
            self._jobs.event(
                job.id,
                "tuned-momentum",
                f"updates are {mean:.1f} versions late on average, which acts like momentum "
                f"{now:.2f}; that of the optimizers is lowered by as much",
                implicit_momentum=now,
                staleness_mean=mean,
            )

    # -- mixing --------------------------------------------------------------------------------

    def _tune_mixing(self, job: JobRecord) -> None:
        metric = job.metric
        if metric is None:
            return
        measured = [
            (each, quality)
            for each in job.evaluations
            if (quality := metric.quality(each.metrics)) is not None
        ]
        before, now = job.tuned.mixing, factor_after(quality for _, quality in measured)
        if now == before:
            return
        self._tunings.tell(mixing=now)
        newest = measured[-1][0]
        how = "worsened" if now < before else "is better again"
        self._jobs.event(
            job.id,
            "tuned-mixing",
            f"validation {how} in epoch {newest.epoch}: {metric.name} "
            f"{newest.metrics[metric.name]:.4f}; updates now have {now:.0%} of the rule's weight",
            factor=now,
            epoch=newest.epoch,
        )
