"""The controller's half that keeps jobs; it knows nothing of machines."""

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

#: for the present step to end
STEP_SECONDS = 10.0
#: for the checkpoints that are written when the controller is stopped
LAST_CHECKPOINT_SECONDS = 15.0
#: after the end of a job its workers may still ask the ledger what became of it
LINGER_LEASES = 3.0


class JobLoop(threading.Thread):
    """Keeps the jobs; apart from the fleet, so that a slow cloud never delays a checkpoint."""

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
        self._keepers: dict[str, JobLifecycle] = {}
        self._tuners: dict[str, Tuner] = {}
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            if self._leadership.sure:
                self._turn()
            self._stopped.wait(self._settings.heartbeat / 4)

    def stop(self, *, checkpoint: bool) -> None:
        """Ends the thread; writes a last checkpoint of each job if asked to."""
        self._stopped.set()
        self.join(timeout=STEP_SECONDS)
        if checkpoint:
            for job, keeper in self._keepers.items():
                try:
                    keeper.checkpoint_now(LAST_CHECKPOINT_SECONDS)
                except VcasgdError as error:
                    log.warning("%s: no last checkpoint: %s", job, error)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _turn(self) -> None:
        try:
            active = self._jobs.active()
            if self._admission:
                self._admission.admit(active)
        except StoreUnavailable as error:
            log.warning("ledger: %s", error)
            return
        for job in active:
            keeper = self._keepers.setdefault(job, self._keeper(job))
            self._tuners.setdefault(job, Tuner(job, self._ledger, self._settings.heartbeat))
            with bound(job=job, request=keeper.request):
                self._step(job)
        for job in self._keepers.keys() - set(active):
            self._clean_up(job)

    def _step(self, job: str) -> None:
        try:
            self._keepers[job].step()
            self._tuners[job].step()
        except StoreUnavailable as error:
            log.warning("%s: %s", job, error)
        except Exception:
            # whatever is wrong with one job must not stop the others
            log.exception("%s", job)

    def _clean_up(self, job: str) -> None:
        try:
            if self._keepers[job].clean_up():
                del self._keepers[job], self._tuners[job]
        except StoreUnavailable as error:
            log.warning("%s: %s", job, error)

    def _keeper(self, job: str) -> JobLifecycle:
        return JobLifecycle(
            job,
            ledger=self._ledger,
            nodes=self._nodes,
            storage=self._storage,
            writer=self._writer,
        )
