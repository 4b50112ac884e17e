"""Runs the jobs of a sweep: a few at a time, within a budget, and without the worst."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vcasgd.client.client import PACKAGE_LIMIT_MB, Client
from vcasgd.client.job import Job
from vcasgd.client.sweep import Trial, below_median, best_qualities
from vcasgd.errors import Conflict
from vcasgd.spec.job import JobSpec
from vcasgd.spec.sections import Metric

#: Seconds between two looks at the jobs.
POLL_SECONDS = 2.0


@dataclass(frozen=True)
class SweepOptions:
    """Limits of a sweep. ``early_stop``: evaluations before the median rule applies; None: never.

    ``max_cost_usd`` is the budget of all its jobs together.
    """

    name: str
    at_once: int = 4
    early_stop: int | None = None
    max_cost_usd: float | None = None
    metric: Metric | None = None
    limit_mb: float = PACKAGE_LIMIT_MB


class Sweep:
    """A sweep. Running it again with the same name and jobs continues it.

    Each job is submitted under an idempotency key of the sweep's name and the job's changes, so no
    job is submitted twice within a week. ``report`` is called with a line for people.
    """

    def __init__(
        self,
        client: Client,
        trials: Mapping[Trial, JobSpec],
        options: SweepOptions,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._options = options
        self._report = report
        self._waiting = dict(trials)
        #: Jobs by ID, in the order of their submission.
        self._jobs: dict[str, Job] = {}
        self._changes: dict[str, Trial] = {}

    def run(self) -> list[Job]:
        """Run all jobs to their ends, and return them.

        Raises the errors of :meth:`vcasgd.Client.submit_directory`.
        """
        while self._waiting or self._running():
            while self._waiting and len(self._running()) < self._options.at_once:
                self._submit_next()
            time.sleep(POLL_SECONDS)
            for job in self._running():
                self._refresh(job)
            self._stop_early()
            self._enforce_budget()
        return list(self._jobs.values())

    def _running(self) -> list[str]:
        return [name for name, job in self._jobs.items() if not job.over]

    def _submit_next(self) -> None:
        changes, spec = next(iter(self._waiting.items()))
        del self._waiting[changes]
        digest = hashlib.sha256(json.dumps(changes).encode()).hexdigest()[:16]
        key = f"sweep/{self._options.name}/{digest}"
        job = self._client.submit_directory(spec, self._options.limit_mb, key)
        self._jobs[job.id], self._changes[job.id] = job, changes
        how = f"had {job.state} already" if job.over else "runs"
        self._report(f"{job.id} {how}: {' '.join(changes)}")

    def _refresh(self, name: str) -> None:
        job = self._jobs[name] = self._client.job(name)
        if job.over:
            best = f", best {job.best}" if job.best else ""
            self._report(f"{name} {job.state}{best}")

    def _stop_early(self) -> None:
        after, running = self._options.early_stop, self._running()
        if after is None:
            return
        qualities = {
            name: best_qualities(job, self._options.metric) for name, job in self._jobs.items()
        }
        for name in below_median(qualities, after):
            if name in running:
                self._report(f"{name} is worse than the median of the others; it is canceled")
                self._cancel(name)

    def _enforce_budget(self) -> None:
        limit = self._options.max_cost_usd
        if limit is None or not (self._waiting or self._running()):
            return
        spent = sum(job.cost().spent_usd for job in self._jobs.values())
        if spent >= limit:
            self._report(f"the budget is used up ({spent:.2f} USD); the sweep ends")
            self._waiting.clear()
            for name in self._running():
                self._cancel(name)

    def _cancel(self, name: str) -> None:
        try:
            self._jobs[name] = self._jobs[name].cancel()
        except Conflict:
            self._refresh(name)  # It has just ended.
