"""The controller's job loop: steps every active job; knows nothing of machines."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from vcasgd.controller.jobs.lifecycle import JobLifecycle
from vcasgd.controller.jobs.sweeper import Sweeper
from vcasgd.controller.jobs.tuning import Tuner
from vcasgd.controller.jobs.worker_events import WorkerEvents
from vcasgd.controller.leadership import Leadership
from vcasgd.encryption import StorageCipher
from vcasgd.errors import (
    JobUnreadable,
    StoreDenied,
    StoreFull,
    StoreUnavailable,
    VcasgdError,
)
from vcasgd.limits import MAX_CONTENT_BYTES
from vcasgd.logging import bound
from vcasgd.settings import Settings
from vcasgd.storage.objects import Storage
from vcasgd.store.admission import LedgerAdmission, worker_lease_pass
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.job_secrets import SecretDelivery
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.retention import Retention
from vcasgd.store.ledger.worker_beats import WorkerBeats
from vcasgd.store.quotas import ContentQuota
from vcasgd.threads import EssentialThread

log = logging.getLogger(__name__)

#: Seconds that :meth:`JobLoop.stop` waits for the present step.
STEP_SECONDS = 10.0
#: Seconds for each checkpoint that is written when the controller stops.
LAST_CHECKPOINT_SECONDS = 15.0
#: Lease times during which workers can still read the state of a job that has ended.
LINGER_LEASES = 3.0
#: Seconds between two deletions of jobs that ended long ago.
RETAIN_SECONDS = 60.0


class JobLoop(EssentialThread):
    """Thread that steps all jobs; apart from the fleet, so a slow cloud delays no checkpoint."""

    def __init__(
        self,
        settings: Settings,
        ledger: RedisClient,
        nodes: Sequence[RedisClient],
        leadership: Leadership,
        beats: WorkerBeats,
    ) -> None:
        super().__init__("jobs")
        self._settings = settings
        self._leadership = leadership
        self._ledger = ledger
        self._nodes = nodes
        self._beats = beats
        self._jobs = Jobs(ledger)
        linger_seconds = LINGER_LEASES * settings.lease_seconds
        self._sweeper = Sweeper(self._jobs, nodes, leadership, linger_seconds)
        self._storage = Storage(settings.required("storage_url"))
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._admission = (
            LedgerAdmission(
                ledger,
                settings.job_secret.get_secret_value(),
                linger_seconds,
            )
            if settings.job_secret
            else None
        )
        self._lifecycles: dict[str, JobLifecycle] = {}
        self._tuners: dict[str, Tuner] = {}
        self._worker_events: dict[str, WorkerEvents] = {}
        self._quotas: dict[str, ContentQuota] = {}
        self._deliveries: dict[str, SecretDelivery] = {}
        key = settings.secrets_key
        self._cipher = StorageCipher(key.get_secret_value()) if key else None
        #: Ended jobs that are not cleaned up, and since when by :func:`time.monotonic`.
        self._ended_at: dict[str, float] = {}
        #: Jobs that were failed because of what their workers wrote.
        self._expelled: set[str] = set()
        self._retention = Retention(ledger)
        self._retain_at = 0.0
        self._stopped = threading.Event()

    def work(self) -> None:
        """Step all jobs while this controller is the leader, until :meth:`stop`."""
        self._sweeper.start()
        while not self._stopped.is_set():
            if self._leadership.sure:
                self._step_all()
            # Without jobs, no step is urgent; a new job has no machine yet.
            self._stopped.wait(self._settings.heartbeat / (4 if self._lifecycles else 1))

    def stop(self, *, checkpoint: bool) -> None:
        """Stop the thread; with ``checkpoint``, write a last checkpoint of each job."""
        self._stopped.set()
        self._sweeper.stop()
        self.join(timeout=STEP_SECONDS)
        if checkpoint:
            for job, lifecycle in self._lifecycles.items():
                try:
                    lifecycle.checkpoint_now(LAST_CHECKPOINT_SECONDS)
                except VcasgdError as error:
                    log.warning("%s: the last checkpoint failed: %s", job, error)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _step_all(self) -> None:
        with _errors_logged("ledger"):
            active = self._jobs.active()
            if self._admission:
                self._admission.admit(active, self._expelled)
            # Whatever is wrong with one job must not stop the others.
            for job in active:
                with _errors_logged(job):
                    self._step(job)
            for job in self._lifecycles.keys() - set(active):
                with _errors_logged(job):
                    self._clean_up(job)
            self._retain()

    def _retain(self) -> None:
        """Delete jobs that ended long ago, except those that are still cleaned up here."""
        if time.monotonic() < self._retain_at:
            return
        deleted = self._retention.keep(self._settings.keep_jobs, self._lifecycles.keys())
        if deleted:
            log.info("deleted jobs that ended long ago: %s", ", ".join(deleted))
            return  # Continues in the next step.
        self._retention.delete_late_writes()
        self._retain_at = time.monotonic() + RETAIN_SECONDS

    def _step(self, job: str) -> None:
        if job not in self._lifecycles:
            self._begin(job)
        lifecycle, tuner, quota = self._lifecycles[job], self._tuners[job], self._quotas[job]
        with bound(job=job, request=lifecycle.request):
            if why := quota.enforce() or _violation(lifecycle):
                self._expel(job, why)
            else:
                if lifecycle.has_secrets:
                    self._deliver_secrets(job)
                tuner.step()
                self._worker_events[job].step()

    def _begin(self, job: str) -> None:
        heartbeat = self._settings.heartbeat
        self._tuners[job] = Tuner(job, self._ledger, self._beats, heartbeat)
        self._worker_events[job] = WorkerEvents(job, self._jobs, self._beats)
        content = dict.fromkeys(LedgerKeys(job).written_by_workers, MAX_CONTENT_BYTES)
        self._quotas[job] = ContentQuota(self._ledger, content, heartbeat)
        pass_of = partial(worker_lease_pass, self._settings, job)
        self._deliveries[job] = SecretDelivery(self._ledger, job, self._cipher, pass_of)
        self._lifecycles[job] = self._lifecycle(job)

    def _deliver_secrets(self, job: str) -> None:
        try:
            self._deliveries[job].answer()
        except JobUnreadable as error:
            active = [state for state in JobState if not state.over]
            self._jobs.transition(job, JobState.FAILED, active, why=error.message)

    def _expel(self, job: str, why: str) -> None:
        """Fail a job, and take its workers' access to the ledger."""
        log.error("%s fails: %s", job, why)
        self._expelled.add(job)
        active = [state for state in JobState if not state.over]
        self._jobs.transition(job, JobState.FAILED, active, why=why)
        self._jobs.event(job, "job-quarantined", f"the job's workers lost their access: {why}")

    def _clean_up(self, job: str) -> None:
        """Delete the data of an ended job, and forget the job once its workers have no access."""
        ended_at = self._ended_at.setdefault(job, time.monotonic())
        if why := self._quotas[job].enforce():
            log.error("%s: %s", job, why)
        lingers = time.monotonic() - ended_at < LINGER_LEASES * self._settings.lease_seconds
        if self._lifecycles[job].clean_up() and not lingers:
            states = (self._lifecycles, self._tuners, self._worker_events, self._quotas,
                      self._deliveries, self._ended_at)  # fmt: skip
            for state in states:
                del state[job]

    def _lifecycle(self, job: str) -> JobLifecycle:
        return JobLifecycle(
            job,
            ledger=self._ledger,
            nodes=self._nodes,
            storage=self._storage,
            writer=self._writer,
        )


def _violation(lifecycle: JobLifecycle) -> str | None:
    """Step a job; return why it can't continue because of what its workers wrote to the ledger."""
    try:
        return lifecycle.step()
    except JobUnreadable as error:
        return error.message


@contextmanager
def _errors_logged(what: str) -> Iterator[None]:
    """Log errors instead of raising them: an outage as a line, a defect with its traceback."""
    try:
        yield
    except (StoreUnavailable, StoreFull, StoreDenied) as error:
        log.warning("%s: %s", what, error)
    except Exception:
        log.exception("%s", what)
