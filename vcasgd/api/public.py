"""The public page: the jobs that everyone may see, and their contributors.

Nobody signs in for it, so it must cost the ledger the same however many ask: all readers of a
process share what it read, or why it could not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from math import isfinite, nan

from anyio import CapacityLimiter, Lock, to_thread

from vcasgd.api.convert import fraction, samples
from vcasgd.errors import StoreError
from vcasgd.schemas.public import (
    ContributionView,
    PublicEvaluationView,
    PublicJobView,
    VolunteersView,
)
from vcasgd.spec.public import Public
from vcasgd.store.ledger.contributors import Contributors
from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.jobs import Jobs

#: Seconds for which all readers share what the ledger contains.
FRESH_SECONDS = 5.0
#: Newest jobs of the cluster among which ended ones are looked for.
NEWEST_JOBS = 20
#: Its own thread, so that readers of a public page never occupy those of the other routes.
_THREAD = CapacityLimiter(1)


class PublicPage:
    """Reads the public jobs at most once in :data:`FRESH_SECONDS`."""

    def __init__(self, jobs: Jobs, contributors: Contributors) -> None:
        self._jobs = jobs
        self._contributors = contributors
        self._lock = Lock()
        self._read_at = float("-inf")
        self._view = VolunteersView(jobs=[])
        self._error: StoreError | None = None

    async def volunteers(self) -> VolunteersView:
        """Return the public jobs. Raises :class:`~vcasgd.errors.StoreUnavailable`."""
        async with self._lock:
            if time.monotonic() - self._read_at >= FRESH_SECONDS:
                await self._refresh()
            if self._error is not None:
                raise self._error.with_traceback(None)
            return self._view

    async def _refresh(self) -> None:
        try:
            self._view = await to_thread.run_sync(self._read, limiter=_THREAD)
            self._error = None
        except StoreError as error:
            self._error = error
        self._read_at = time.monotonic()

    def _read(self) -> VolunteersView:
        active = self._jobs.active()
        names = list(dict.fromkeys((*self._jobs.newest(NEWEST_JOBS), *active[::-1])))
        records = self._jobs.get_many(names)
        public = [
            (job, job.spec.public)
            for job in (records[name] for name in names if name in records)
            if job.spec.public is not None
        ]
        workers = self._jobs.workers.counts([job.id for job, _ in public])
        nicknames = self._contributors.nicknames()
        views = [_job(job, title, workers[job.id], nicknames) for job, title in public]
        return VolunteersView(jobs=views)


def _job(
    job: JobRecord, public: Public, workers: int, nicknames: Mapping[str, str]
) -> PublicJobView:
    applied, total = samples(job)
    contributed: Counter[str | None] = Counter()
    for contributor, count in job.totals.get("contributions", {}).items():
        contributed[nicknames.get(contributor)] += count
    return PublicJobView(
        title=public.title,
        description=public.description,
        state=job.state,
        progress=fraction(job),
        samples=applied,
        total_samples=total,
        evaluation=_evaluation(job),
        machines=0 if job.state.over else workers,
        contributions=[
            ContributionView(nickname=nickname, samples=count, share=_share(count, applied))
            for nickname, count in contributed.most_common()
        ],
        own_samples=max(0, applied - contributed.total()),
    )


def _share(count: int, applied: int) -> float:
    # With several shards, the first may be ahead of the others, whose least is what is applied.
    return min(1.0, count / applied) if applied else 0.0


def _evaluation(job: JobRecord) -> PublicEvaluationView | None:
    """Return the last evaluation's value of the metric that ranks the job's models.

    A worker may have written any other name of a metric.
    """
    last, metric = next(reversed(job.evaluations), None), job.metric
    value = last.metrics.get(metric.name, nan) if last and metric else nan
    if last is None or metric is None or not isfinite(value):
        return None
    return PublicEvaluationView(metric=metric.name, value=value, epoch=last.epoch, at=last.at)
