"""Back-off before a worker whose process crashed is started again on its machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from vcasgd.backoff import backoff
from vcasgd.errors import Cause
from vcasgd.logging import bound, isolated
from vcasgd.steady_time import steady_time
from vcasgd.store.ledger.job import PROCESS, Failure
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.worker_names import machine_of

log = logging.getLogger(__name__)

#: Seconds before the first restart, and at most before later ones.
RESTART_SECONDS = (1.0, 60.0)


class RestartBackoff:
    """Counts crashes by worker, in memory: a new controller starts from zero.

    A process also ends when its machine does, of which Ray learns later. So the end of a process is
    a crash only if its machine is still in the cluster ``confirm_seconds`` later.
    """

    def __init__(
        self, jobs: Jobs, confirm_seconds: float, clock: Callable[[], float] = steady_time
    ) -> None:
        self._jobs = jobs
        self._confirm_seconds = confirm_seconds
        #: Worker, when its process ended, its job, and what Ray says about it, in this order.
        self._unconfirmed: list[tuple[str, float, str, str]] = []
        self._clock = clock
        self._counts: dict[str, int] = {}
        self._not_before: dict[str, float] = {}

    def record_end(self, worker: str, job: str, reason: str) -> None:
        """Record that a worker's process ended.

        It is no crash if the worker was asked to leave, or if its last heartbeat says why it
        leaves, or that its machine is about to be taken.
        """
        beat = self._jobs.workers.heartbeat(job, worker)
        leaves = beat is not None and (beat.leaving or beat.notice == "terminate")
        if leaves or worker in self._jobs.workers.draining(job):
            self._counts.pop(worker, None)
            return
        self._counts[worker] = self._counts.get(worker, 0) + 1
        pause = backoff(self._counts[worker], *RESTART_SECONDS)
        self._not_before[worker] = self._clock() + pause
        with bound(job=job, worker=worker, request=self._jobs.request_of(job)):
            log.warning("%s: its process ended: %s; restart in %.0f s", worker, reason, pause)
        self._unconfirmed.append((worker, self._clock(), job, reason))

    def confirm(self, machines: Collection[str]) -> None:
        """Report the crashes of workers whose machine is still among ``machines``, if it is time.

        Raises :class:`~vcasgd.errors.StoreUnavailable`.
        """
        for end in list(self._unconfirmed):
            worker, ended_at, job, reason = end
            lost = machine_of(worker) not in machines
            if not lost and self._clock() - ended_at < self._confirm_seconds:
                continue
            if not lost:
                with isolated(job):
                    self._report(worker, job, reason)
            self._unconfirmed.remove(end)

    def _report(self, worker: str, job: str, reason: str) -> None:
        message = f"the process of worker {worker} ended: {reason or 'unknown reason'}"
        self._jobs.report_failure(job, Failure(worker, PROCESS, message, "", Cause.WORK))
        self._jobs.event(job, "worker-crashed", message, worker=worker)

    def may_start(self, worker: str) -> bool:
        """Return True if the worker's back-off has passed."""
        return self._clock() >= self._not_before.get(worker, 0.0)
