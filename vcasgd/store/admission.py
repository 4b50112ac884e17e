"""Who is let into the servers: the workers of active jobs that are neither in quarantine nor in a
pool that may not see the job's data."""

from __future__ import annotations

from collections.abc import Iterable

from vcasgd.settings import Settings
from vcasgd.store.acl import (
    LEDGER_SCRIPTS,
    LEDGER_USERS,
    TENSORS_SCRIPTS,
    TENSORS_USERS,
    AclUsers,
    User,
    lease_pass,
    ledger_user,
    tensors_user,
    worker_key,
)
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.clearance import Clearances
from vcasgd.store.ledger.jobs import Jobs

#: of one job that are let in
MOST_WORKERS = 1000


def worker_environment(settings: Settings, job: str, worker: str) -> dict[str, str]:
    """How a worker reaches the servers, and its key. Raises :class:`~vcasgd.errors.SpecError`.

    Without a secret to derive its own from, it gets our credentials.
    """
    ledger, tensors = settings.secret("ledger_url"), settings.secret("tensors_url")
    if settings.job_secret is None:
        return {"VCASGD_LEDGER_URL": ledger, "VCASGD_TENSORS_URL": tensors}
    secret = settings.job_secret.get_secret_value()
    on_tensors = tensors_user(secret, job, worker)
    return {
        "VCASGD_LEDGER_URL": ledger_user(secret, job).url(ledger),
        "VCASGD_TENSORS_URL": " ".join(on_tensors.url(url) for url in tensors.split()),
        "VCASGD_WORKER_KEY": worker_key(secret, job, worker),
    }


def own_pass(settings: Settings, job: str, worker: str) -> str:
    """With which the worker will show the ledger who it is; empty where there is no secret."""
    if settings.job_secret is None:
        return ""
    return lease_pass(worker_key(settings.job_secret.get_secret_value(), job, worker))


class LedgerAdmission:
    """The controller's hand on the ledger: one user for the workers of each active job."""

    def __init__(self, ledger: RedisClient, secret: str, linger_seconds: float) -> None:
        self._access = AclUsers(ledger, LEDGER_SCRIPTS, linger_seconds)
        self._secret = secret
        self._adopted = False

    def admit(self, jobs: Iterable[str]) -> None:
        """``jobs``: all that are active. Raises :class:`~vcasgd.errors.StoreUnavailable`."""
        if not self._adopted:
            # of jobs that ended while no controller was there
            self._access.adopt(LEDGER_USERS)
            self._adopted = True
        self._access.keep(ledger_user(self._secret, job) for job in jobs)


class TensorsAdmission:
    """The parameter server's hand on its tensors server, which forgets its users at a restart.

    ``linger_seconds``: for how long a worker that is gone stays admitted.
    """

    def __init__(
        self, tensors: RedisClient, ledger: RedisClient, secret: str, linger_seconds: float
    ) -> None:
        self._access = AclUsers(tensors, TENSORS_SCRIPTS, linger_seconds)
        self._jobs = Jobs(ledger)
        self._clearances = Clearances(ledger)
        self._secret = secret
        #: by job; None until the ledger was heard for the first time
        self._workers: dict[str, list[str]] | None = None
        self._banned: set[str] = set()
        self._adopted = False

    def look(self, jobs: Iterable[str]) -> None:
        """Asks the ledger who works. Raises :class:`~vcasgd.errors.StoreUnavailable`; then who
        worked before is still admitted."""
        workers: dict[str, list[str]] = {}
        banned = set()
        for job in jobs:
            beating = self._jobs.workers(job).keys()
            # a model knows its data
            shut_out = self._jobs.quarantined(job).keys() | self._clearances.uncleared(job, beating)
            there = beating - shut_out
            # whoever writes heartbeats under many names crowds out its own job's workers
            workers[job] = sorted(there)[:MOST_WORKERS]
            banned |= {self._user(job, name, first_snapshot=False).name for name in shut_out}
        self._workers, self._banned = workers, banned

    def admit(self, first_snapshot: Iterable[str]) -> None:
        """Lets them in; those of the jobs in ``first_snapshot`` may make a first snapshot.

        Raises :class:`~vcasgd.errors.StoreUnavailable`.
        """
        if self._workers is not None and not self._adopted:
            # of workers that left while no parameter server was there
            self._access.adopt(TENSORS_USERS)
            self._adopted = True
        without_model = set(first_snapshot)
        users = [
            self._user(job, name, first_snapshot=job in without_model)
            for job, names in (self._workers or {}).items()
            for name in names
        ]
        self._access.keep(users, self._banned)

    def _user(self, job: str, worker: str, *, first_snapshot: bool) -> User:
        return tensors_user(self._secret, job, worker, first_snapshot=first_snapshot)
