"""The controller's job loop: steps every active job; knows nothing of machines."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from vcasgd.controller.jobs.announcements import WorkerEvents
from vcasgd.controller.jobs.lifecycle import JobLifecycle
from vcasgd.controller.jobs.tuning import Tuner
from vcasgd.controller.leadership import Leadership, LeaderThread
from vcasgd.encryption import StorageCipher
from vcasgd.errors import (
    JobUnreadable,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    VcasgdError,
)
from vcasgd.limits import MAX_CONTENT_BYTES
from vcasgd.logging import bound
from vcasgd.settings import Settings
from vcasgd.storage.objects import Storage
from vcasgd.store.acl import LEDGER_SCRIPTS, LEDGER_USERS, AclUsers, ledger_user
from vcasgd.store.admission import worker_lease_pass
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.costs import Workloads
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.job_secrets import SecretDelivery
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.retention import Retention
from vcasgd.store.ledger.workers import WorkerBeats
from vcasgd.store.quotas import ContentQuota
from vcasgd.store.tensors.snapshot_index import delete_job, scan_jobs
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
#: Seconds between two calls to each tensors server, and after all keys of all servers.
PAUSE_SECONDS, REST_SECONDS = 1.0, 5.0


class Sweeper(LeaderThread):
    """Thread that looks through the keys of the tensors servers, a few at a time, without end.

    A job that ends while a controller runs is cleaned up by the job loop. This thread finds the
    others: jobs that ended while no controller ran, and data that a worker or a failover brought
    back. Data stays while it is younger than ``grace_seconds``, and if this ledger doesn't know its
    job as ended or just deleted.
    """

    def __init__(
        self,
        jobs: Jobs,
        nodes: Sequence[RedisClient],
        leads: Callable[[], bool],
        grace_seconds: float,
    ) -> None:
        super().__init__("sweeper", leads, REST_SECONDS)
        self._jobs = jobs
        self._nodes = nodes
        self._grace_seconds = grace_seconds
        self._cursors = [0] * len(nodes)
        #: Ended jobs with data, and since when by :func:`time.monotonic`.
        self._found_at: dict[str, float] = {}

    def look(self) -> None:
        """Sweep a few keys of each server."""
        for node in range(len(self._nodes)):
            if self._leads() and not self._stopped.is_set():
                self._sweep(node)
        self._pause_seconds = PAUSE_SECONDS if any(self._cursors) else REST_SECONDS

    def _sweep(self, node: int) -> None:
        try:
            self._cursors[node], found = scan_jobs(self._nodes[node], self._cursors[node])
            for job in found:
                if self._jobs.is_over(job):
                    self._delete_job(job)
        except StoreError as error:
            log.warning("store node %d: %s", node, error)

    def _delete_job(self, job: str) -> None:
        found_at = self._found_at.setdefault(job, time.monotonic())
        if time.monotonic() - found_at < self._grace_seconds:
            return
        log.info("%s has ended; its data is deleted from the tensors servers", job)
        delete_job(self._nodes, job)
        del self._found_at[job]


@dataclass
class _KnownJob:
    lifecycle: JobLifecycle
    tuner: Tuner
    events: WorkerEvents
    quota: ContentQuota
    delivery: SecretDelivery
    #: Since when it has ended, by :func:`time.monotonic`.
    ended_at: float | None = None


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
        self._sweeper = Sweeper(self._jobs, nodes, lambda: leadership.sure, linger_seconds)
        self._storage = Storage(settings.required("storage_url"))
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        #: One for the workers of each active job; it outlives its job by ``linger_seconds``.
        self._users = AclUsers(ledger, LEDGER_SCRIPTS, linger_seconds, LEDGER_USERS)
        #: Jobs that are active, or not cleaned up yet.
        self._known: dict[str, _KnownJob] = {}
        key = settings.secrets_key
        self._cipher = StorageCipher(key.get_secret_value()) if key else None
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
            self._stopped.wait(self._settings.heartbeat / (4 if self._known else 1))

    def stop(self, *, checkpoint: bool) -> None:
        """Stop the thread; with ``checkpoint``, write a last checkpoint of each job."""
        self._stopped.set()
        self._sweeper.stop()
        self.join(timeout=STEP_SECONDS)
        if checkpoint:
            for job, known in self._known.items():
                try:
                    known.lifecycle.checkpoint_now(LAST_CHECKPOINT_SECONDS)
                except VcasgdError as error:
                    log.warning("%s: the last checkpoint failed: %s", job, error)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _step_all(self) -> None:
        with _errors_logged("ledger"):
            active = self._jobs.active()
            if secret := self._settings.job_secret:
                user = partial(ledger_user, secret.get_secret_value())
                self._users.sync(map(user, active), [user(job).name for job in self._expelled])
            # Whatever is wrong with one job must not stop the others.
            for job in active:
                with _errors_logged(job):
                    self._step(job)
            for job in self._known.keys() - set(active):
                with _errors_logged(job):
                    self._clean_up(job)
            self._retain()

    def _retain(self) -> None:
        """Delete jobs that ended long ago, except those that are still cleaned up here."""
        if time.monotonic() < self._retain_at:
            return
        deleted = self._retention.keep(self._settings.keep_jobs, self._known.keys())
        if deleted:
            log.info("deleted jobs that ended long ago: %s", ", ".join(deleted))
            return  # Continues in the next step.
        self._retention.delete_late_writes()
        Workloads(self._ledger).trim()
        self._retain_at = time.monotonic() + RETAIN_SECONDS

    def _step(self, job: str) -> None:
        if job not in self._known:
            self._known[job] = self._begin(job)
        known = self._known[job]
        with bound(job=job, request=known.lifecycle.request):
            try:
                violation = known.quota.enforce() or known.lifecycle.step()
            except JobUnreadable as error:
                violation = error.message
            if violation:
                self._expel(job, violation)
                return
            if known.lifecycle.has_secrets:
                self._deliver_secrets(job, known.delivery)
            known.tuner.step()
            known.events.step()

    def _begin(self, job: str) -> _KnownJob:
        settings, ledger = self._settings, self._ledger
        content = dict.fromkeys(LedgerKeys(job).written_by_workers, MAX_CONTENT_BYTES)
        pass_of = partial(worker_lease_pass, settings, job)
        return _KnownJob(
            JobLifecycle(
                job, ledger=ledger, nodes=self._nodes, storage=self._storage, writer=self._writer
            ),
            Tuner(job, ledger, self._beats, settings.heartbeat),
            WorkerEvents(job, self._jobs, self._beats),
            ContentQuota(ledger, content, settings.heartbeat),
            SecretDelivery(ledger, job, self._cipher, pass_of),
        )

    def _deliver_secrets(self, job: str, delivery: SecretDelivery) -> None:
        try:
            delivery.answer()
        except JobUnreadable as error:
            self._fail(job, error.message)

    def _expel(self, job: str, why: str) -> None:
        """Fail a job, and take its workers' access to the ledger."""
        log.error("%s fails: %s", job, why)
        self._expelled.add(job)
        self._fail(job, why)
        self._jobs.event(job, "job-quarantined", f"the job's workers lost their access: {why}")

    def _fail(self, job: str, why: str) -> None:
        active = [state for state in JobState if not state.over]
        self._jobs.transition(job, JobState.FAILED, active, why=why)

    def _clean_up(self, job: str) -> None:
        """Delete the data of an ended job, and forget the job once its workers have no access."""
        known, now = self._known[job], time.monotonic()
        known.ended_at = now if known.ended_at is None else known.ended_at
        if why := known.quota.enforce():
            log.error("%s: %s", job, why)
        lingers = now - known.ended_at < LINGER_LEASES * self._settings.lease_seconds
        if known.lifecycle.clean_up() and not lingers:
            del self._known[job]


@contextmanager
def _errors_logged(what: str) -> Iterator[None]:
    """Log errors instead of raising them: an outage as a line, a defect with its traceback."""
    try:
        yield
    except (StoreUnavailable, StoreFull, StoreDenied) as error:
        log.warning("%s: %s", what, error)
    except Exception:
        log.exception("%s", what)
