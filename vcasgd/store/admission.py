"""Admission of workers to the servers.

Workers of active jobs have access, except workers in quarantine and workers in a pool that is
not cleared for the job's data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from urllib.parse import urlsplit

from vcasgd.errors import SpecError
from vcasgd.settings import Settings
from vcasgd.store.acl import (
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
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.placement import Clearances

#: Name of the ledger among the services of a stack.
LEDGER = "ledger"
#: Stands for the folder with the sockets on a machine that joined by itself.
SOCKETS = "/sockets"
#: Most workers of one job that have access. A user takes 16 KB of a server's memory.
MAX_WORKERS = 10_000
#: The same for workers that no controller placed: a worker can report under many names.
MAX_UNPLACED = 1000
#: Users that are created at once, in less than a tenth of a second; updates wait meanwhile.
USERS_AT_ONCE = 200


def tensors_service(node: int) -> str:
    """Return the name of a store node's tensors server among the services of a stack."""
    return f"tensors-{node}"


def worker_environment(settings: Settings, job: str, worker: str) -> dict[str, str]:
    """Return the environment variables with a worker's server URLs and signing key.

    Without ``VCASGD_JOB_SECRET``, the worker gets the platform's own credentials and no key.
    Raises :class:`~vcasgd.errors.SpecError` if a URL is not set.
    """
    ledger, tensors = settings.required("ledger_url"), settings.required("tensors_url")
    if settings.job_secret is None:
        return {"VCASGD_LEDGER_URL": ledger, "VCASGD_TENSORS_URL": tensors}
    return _environment(settings, job, worker, ledger, tensors.split())


def joined_environment(
    settings: Settings, job: str, worker: str, *, volunteer: bool = False
) -> dict[str, str]:
    """Return :func:`worker_environment` for a machine that joined by itself, a ``volunteer``'s or
    one's own.

    It reaches the servers by Unix sockets, one for each of :data:`LEDGER`
    and the tensors servers, in the folder that :data:`SOCKETS` stands for. Raises
    :class:`~vcasgd.errors.SpecError` if workers would get the platform's own credentials.
    """
    if settings.job_secret is None:
        raise SpecError(
            "machines that join need server users of their own, and VCASGD_JOB_USERS is false",
            remedy="let the stack manage the users of its servers",
            field="VCASGD_JOB_USERS",
        )
    tensors = enumerate(settings.tensors_urls())
    return {
        **_environment(
            settings,
            job,
            worker,
            _socket_url(LEDGER, settings.required("ledger_url")),
            [_socket_url(tensors_service(node), url) for node, url in tensors],
        ),
        **({"VCASGD_VOLUNTEER": "true"} if volunteer else {}),
    }


def _environment(
    settings: Settings, job: str, worker: str, ledger: str, tensors: Iterable[str]
) -> dict[str, str]:
    secret = settings.required("job_secret")
    on_tensors = tensors_user(secret, job, worker)
    return {
        "VCASGD_LEDGER_URL": ledger_user(secret, job).url(ledger),
        "VCASGD_TENSORS_URL": " ".join(on_tensors.url(url) for url in tensors),
        "VCASGD_WORKER_KEY": worker_key(secret, job, worker),
    }


def _socket_url(service: str, url: str) -> str:
    database = urlsplit(url).path.rpartition("/")[2]
    return f"unix://{SOCKETS}/{service}?db={database if database.isdecimal() else 0}"


def worker_lease_pass(settings: Settings, job: str, worker: str) -> str:
    """Return the credential that authenticates a worker to the ledger.

    It is empty if ``VCASGD_JOB_SECRET`` is not set.
    """
    if settings.job_secret is None:
        return ""
    return lease_pass(worker_key(settings.job_secret.get_secret_value(), job, worker))


class TensorsAdmission:
    """Manages users on a tensors server for its parameter server: one for each worker.

    A tensors server loses its users at a restart. A user is deleted ``linger_seconds`` after its
    worker is gone.
    """

    def __init__(
        self,
        tensors: RedisClient,
        ledger: RedisClient,
        secret: str,
        linger_seconds: float,
    ) -> None:
        self._users = AclUsers(tensors, TENSORS_SCRIPTS, linger_seconds, TENSORS_USERS)
        self._jobs = Jobs(ledger)
        self._clearances = Clearances(ledger)
        self._secret = secret
        #: Job → its shards on this server.
        self._shards: Mapping[str, range] = {}
        #: Job → names of its workers; None before the ledger answers for the first time.
        self._workers: dict[str, list[str]] | None = None
        self._banned: set[str] = set()

    def refresh(self, jobs: Mapping[str, range]) -> None:
        """Read from the ledger which workers of ``jobs`` should have access to their shards.

        Raises :class:`~vcasgd.errors.StoreUnavailable`; the previous workers then keep access.
        """
        workers: dict[str, list[str]] = {}
        banned, self._shards = set(), jobs
        for job in jobs:
            names = self._jobs.workers.names(job)
            # a model reveals its data, so clearances apply here too
            excluded = self._jobs.workers.quarantined(job).keys() | self._clearances.uncleared(
                job, names
            )
            workers[job] = _admissible(names - excluded, self._clearances.placed(job))
            banned |= {self._user(job, name, first_snapshot=False).name for name in excluded}
        self._workers, self._banned = workers, banned

    def admit(self, first_snapshot: Iterable[str]) -> bool:
        """Create users for the workers read by :meth:`refresh`, and delete all others.

        Workers of the jobs in ``first_snapshot`` may install a first snapshot. Returns False if
        there are so many new users that it must be called again. Raises
        :class:`~vcasgd.errors.StoreUnavailable`.
        """
        if self._workers is None:
            return True  # It is unknown which users are no longer needed.
        without_model = set(first_snapshot)
        users = [
            self._user(job, name, first_snapshot=job in without_model)
            for job, names in self._workers.items()
            for name in names
        ]
        return self._users.sync(users, self._banned, USERS_AT_ONCE)

    def _user(self, job: str, worker: str, *, first_snapshot: bool) -> User:
        shards = self._shards.get(job, range(1))
        return tensors_user(self._secret, job, worker, shards=shards, first_snapshot=first_snapshot)


def _admissible(workers: Set[str], placed: Set[str]) -> list[str]:
    """Return the workers that get access; a hostile one can displace only those of its own job."""
    return sorted(workers & placed)[:MAX_WORKERS] + sorted(workers - placed)[:MAX_UNPLACED]
