"""Automatic tuning of one job: measure, decide, and write the decision to the ledger.

The next controller continues from the values in the ledger. The decisions themselves are in
:mod:`vcasgd.learning.tuning`.
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
from vcasgd.spec.sections import metric_text
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.job import JobRecord, JobState
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.tuning import Tunings
from vcasgd.store.ledger.workers import WorkerBeats

#: Updates over which staleness is averaged; a mean over fewer depends mostly on their order.
MIN_UPDATES = 50


class Tuner:
    """Tunes one job every ``period`` seconds.

    Call :meth:`step` at least as often. It raises :class:`~vcasgd.errors.StoreUnavailable` and can
    be repeated.
    """

    def __init__(
        self,
        job: str,
        ledger: RedisClient,
        beats: WorkerBeats,
        period: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._jobs = Jobs(ledger)
        self._beats = beats
        self._tunings = Tunings(ledger, job)
        self._period = period
        self._clock = clock
        self._next = float("-inf")
        #: Updates and the sum of their staleness when averaging began.
        self._since: tuple[int, int] | None = None

    def step(self) -> None:
        """Tune the job if a period has passed and it is running."""
        if self._clock() < self._next:
            return
        job = self._jobs.get(self._job)
        # The specification of a job never changes.
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
        beats = self._beats.of(job.id)
        seconds = {
            name: beat.step_seconds for name, beat in beats.items() if beat.step_seconds is not None
        }
        before = {name: share for name, share in job.tuned.shares.items() if name in beats}
        # A restarted worker that is not measured yet keeps the share of its name.
        shares = {**before, **shares_by_speed(seconds, before)}
        if shares == job.tuned.shares:
            return
        self._tunings.publish(shares=shares)
        changed = {name: share for name, share in shares.items() if share != before.get(name, 1.0)}
        for name, share in sorted(changed.items()):
            self._jobs.event(
                job.id,
                "tuned-local-steps",
                f"{name} takes {1000 * seconds[name]:.1f} ms for a local step and now makes "
                f"{share:.0%} of the push interval's steps",
                worker=name,
                share=share,
                step_seconds=seconds[name],
            )

    # -- momentum ------------------------------------------------------------------------------

    def _tune_momentum(self, job: JobRecord) -> None:
        updates = int(job.totals.get("updates", 0))
        staleness = int(job.totals.get("staleness_sum", 0))
        # A model that was lost restarts from a checkpoint with fewer updates.
        if self._since is None or updates < self._since[0]:
            self._since = (updates, staleness)
        count = updates - self._since[0]
        if count < MIN_UPDATES:
            return
        mean = (staleness - self._since[1]) / count
        self._since = (updates, staleness)
        before = job.tuned.implicit_momentum
        now = smoothed_momentum(implicit_momentum(mean), before)
        if now != before:
            self._tunings.publish(implicit_momentum=now)
            self._jobs.event(
                job.id,
                "tuned-momentum",
                f"the mean staleness of updates is {mean:.1f}, which acts like momentum "
                f"{now:.2f}; the optimizers' momentum is lowered by the same amount",
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
        self._tunings.publish(mixing=now)
        newest = measured[-1][0]
        how = "worsened" if now < before else "improved again"
        value = metric_text(metric.name, newest.metrics[metric.name])
        self._jobs.event(
            job.id,
            "tuned-mixing",
            f"validation {how} in {newest.place}: {value}; "
            f"updates now have {now:.0%} of the rule's weight",
            factor=now,
            epoch=newest.epoch,
        )
