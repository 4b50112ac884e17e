"""Back-off before a worker whose process crashed is started again on its machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from vcasgd.backoff import backoff
from vcasgd.logging import bound
from vcasgd.store.ledger.job import Failure
from vcasgd.store.ledger.jobs import Jobs

log = logging.getLogger(__name__)

#: Seconds before the first restart, and at most before later ones.
RESTART_SECONDS = (1.0, 60.0)


class RestartBackoff:
    """Counts crashes by worker, in memory: a new controller starts from zero."""

    def __init__(self, jobs: Jobs, clock: Callable[[], float] = time.time) -> None:
        self._jobs = jobs
        self._clock = clock
        self._counts: dict[str, int] = {}
        self._not_before: dict[str, float] = {}

    def record_end(self, worker: str, job: str, reason: str) -> None:
        """Record that a worker's process ended.

        It is a crash unless the worker's last heartbeat says why the worker leaves.
        """
        beat = self._jobs.workers(job).get(worker)
        if beat is not None and beat.leaving:
            self._counts.pop(worker, None)
            return
        self._counts[worker] = self._counts.get(worker, 0) + 1
        pause = backoff(self._counts[worker], *RESTART_SECONDS)
        self._not_before[worker] = self._clock() + pause
        with bound(job=job, worker=worker, request=self._jobs.request_of(job)):
            log.warning("%s: its process ended: %s; restart in %.0f s", worker, reason, pause)
        message = f"the process of worker {worker} ended: {reason or 'unknown reason'}"
        self._jobs.report_failure(job, Failure(worker, "process", message, "", fatal=False))
        self._jobs.event(job, "worker-crashed", message, worker=worker)

    def may_start(self, worker: str) -> bool:
        """Return True if the worker's back-off has passed."""
        return self._clock() >= self._not_before.get(worker, 0.0)
