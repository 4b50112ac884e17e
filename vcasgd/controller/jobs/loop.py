"""The controller's job loop: steps every active job; knows nothing of machines."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from vcasgd.controller.jobs.lifecycle import JobLifecycle
from vcasgd.controller.jobs.tuning import Tuner
from vcasgd.controller.leadership import Leadership
from vcasgd.errors import StoreUnavailable, VcasgdError
from vcasgd.logging import bound
from vcasgd.settings import Settings
from vcasgd.storage.objects import Storage
from vcasgd.store.admission import LedgerAdmission
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.jobs import Jobs

log = logging.getLogger(__name__)

#: Seconds that :meth:`JobLoop.stop` waits for the present step.
STEP_SECONDS = 10.0
#: Seconds for each checkpoint that is written when the controller stops.
LAST_CHECKPOINT_SECONDS = 15.0
#: Lease times during which workers can still read the state of a job that has ended.
LINGER_LEASES = 3.0


class JobLoop(threading.Thread):
    """Thread that steps all jobs; apart from the fleet, so a slow cloud delays no checkpoint."""

    def __init__(
        self,
        settings: Settings,
        ledger: RedisClient,
        nodes: Sequence[RedisClient],
        leadership: Leadership,
    ) -> None:
        super().__init__(name="jobs", daemon=True)
        self._settings = settings
        self._leadership = leadership
        self._ledger = ledger
        self._nodes = nodes
        self._jobs = Jobs(ledger)
        self._storage = Storage(settings.required("storage_url"))
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._admission = (
            LedgerAdmission(
                ledger,
                settings.job_secret.get_secret_value(),
                LINGER_LEASES * settings.lease_seconds,
            )
            if settings.job_secret
            else None
        )
        self._lifecycles: dict[str, JobLifecycle] = {}
        self._tuners: dict[str, Tuner] = {}
        self._stopped = threading.Event()

    def run(self) -> None:
        """Step all jobs while this controller is the leader, until :meth:`stop`."""
        while not self._stopped.is_set():
            if self._leadership.sure:
                self._step_all()
            self._stopped.wait(self._settings.heartbeat / 4)

    def stop(self, *, checkpoint: bool) -> None:
        """Stop the thread; with ``checkpoint``, write a last checkpoint of each job."""
        self._stopped.set()
        self.join(timeout=STEP_SECONDS)
        if checkpoint:
            for job, lifecycle in self._lifecycles.items():
                try:
                    lifecycle.checkpoint_now(LAST_CHECKPOINT_SECONDS)
                except VcasgdError as error:
                    log.warning("%s: the last checkpoint failed: %s", job, error)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _step_all(self) -> None:
        try:
            active = self._jobs.active()
            if self._admission:
                self._admission.admit(active)
        except StoreUnavailable as error:
            log.warning("ledger: %s", error)
            return
        for job in active:
            lifecycle = self._lifecycles.setdefault(job, self._lifecycle(job))
            self._tuners.setdefault(job, Tuner(job, self._ledger, self._settings.heartbeat))
            with bound(job=job, request=lifecycle.request):
                self._step(job)
        for job in self._lifecycles.keys() - set(active):
            self._clean_up(job)

    def _step(self, job: str) -> None:
        try:
            self._lifecycles[job].step()
            self._tuners[job].step()
        except StoreUnavailable as error:
            log.warning("%s: %s", job, error)
        except Exception:
            # A defect that shows in one job must not stop the others.
            log.exception("%s", job)

    def _clean_up(self, job: str) -> None:
        try:
            if self._lifecycles[job].clean_up():
                del self._lifecycles[job], self._tuners[job]
        except StoreUnavailable as error:
            log.warning("%s: %s", job, error)

    def _lifecycle(self, job: str) -> JobLifecycle:
        return JobLifecycle(
            job,
            ledger=self._ledger,
            nodes=self._nodes,
            storage=self._storage,
            writer=self._writer,
        )
