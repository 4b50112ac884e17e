"""Client of the REST API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vcasgd.client.following import PATIENCE_SECONDS, SILENCE_SECONDS, messages
from vcasgd.client.job import Job, submitted
from vcasgd.client.secrets import check_secret_files, read_secrets
from vcasgd.client.transport import FILE_SECONDS, PAGE, Transport, find_api, local_home, path_of
from vcasgd.errors import Conflict, NotFound
from vcasgd.schemas.costs import PlanView, SpendView
from vcasgd.schemas.fleet import (
    EvictionRequested,
    FleetBrief,
    JobBrief,
    JobEventRow,
    Machine,
    MachinesBrief,
    PoolRow,
    StatusView,
    StoreBrief,
    StoreView,
    StreamMessage,
    WorkerRow,
)
from vcasgd.schemas.jobs import Validation
from vcasgd.schemas.service import CallerView, NewToken, TokenView
from vcasgd.settings import load_settings
from vcasgd.spec.access import Scope
from vcasgd.spec.job import JobSpec
from vcasgd.task.package import check_files, digest_of, pack

if TYPE_CHECKING:
    from torch.nn import Module

#: Default limit for the size of a package in MB.
PACKAGE_LIMIT_MB = 100.0
_LISTED = "vcasgd jobs lists the IDs of jobs"
#: Jobs that the error for an ambiguous name lists.
MAX_NAMED = 5

_STREAM_DATA: dict[str, type[JobBrief | FleetBrief | MachinesBrief | StoreBrief | JobEventRow]] = {
    "job": JobBrief,
    "fleet": FleetBrief,
    "machines": MachinesBrief,
    "store": StoreBrief,
    "event": JobEventRow,
}


def load(job: str, checkpoint: str | None = None, *, client: Client | None = None) -> Module:
    """Return the module of a job with the weights of its finished model, or of a checkpoint.

    ``job`` is an ID: this runs the job's code, and other users' jobs can have its name. Without
    a ``client``, the job is one of the stack that :class:`Client` finds by itself. See
    :meth:`Job.load`.
    """
    if client is None:
        with Client() as own:
            return load(job, checkpoint, client=own)
    found = client.job(job)
    if found.id != job:
        raise Conflict(f"{job} is not the ID of a job", remedy=f"use the ID: {found.id}")
    return found.load(checkpoint)


def packed(spec: JobSpec, limit_mb: float = PACKAGE_LIMIT_MB) -> bytes:
    """Check the files of a job, and return its working directory as a package.

    Raises :class:`~vcasgd.errors.PackageError`, and the errors of
    :func:`~vcasgd.client.secrets.check_secret_files` and :func:`~vcasgd.task.package.check_files`.
    """
    check_secret_files(spec)
    check_files(spec)
    return pack(Path(spec.working_dir), int(limit_mb * 1e6))


class Client:
    """Connection to one API. Threads may share it; close it, or use it in a ``with`` statement.

    Every method raises :class:`~vcasgd.errors.ApiError` if the API does not answer,
    :class:`~vcasgd.errors.Unauthorized` if the token is wrong,
    :class:`~vcasgd.errors.Forbidden` if its scope is not sufficient, and
    :class:`~vcasgd.errors.NotFound` if the job, the worker, or the checkpoint does not exist.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        timeout: float = 30.0,
        ca_file: Path | None = None,
    ) -> None:
        """Connect to an API.

        ``url`` and ``token``: by default ``VCASGD_API_URL`` and ``VCASGD_TOKEN``, else those of the
        stack on this machine. ``ca_file``: PEM file with the certificate of the API, or of its
        authority; by default ``VCASGD_CA_FILE``.

        Raises :class:`~vcasgd.errors.SpecError` if it can't be read,
        :class:`~vcasgd.errors.StackError` if no API is known, and
        :class:`~vcasgd.errors.Unauthorized` if there is no token for it.
        """
        settings = load_settings()
        url, token = find_api(url, token, settings)
        self._api = Transport(
            url, token, timeout, ca_file or settings.ca_file, home=local_home(url, settings)
        )

    def __repr__(self) -> str:
        return f"Client({self._api.url!r})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._api.close()

    # -- jobs -------------------------------------------------------------------------------

    def submit(
        self,
        spec: JobSpec,
        package: bytes,
        idempotency_key: str | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> Job:
        """Upload the package unless the API has it, and create a job.

        ``secrets`` replaces what is read from the sources in the spec. A repeated call with the
        same key returns the same job; one whose answer is lost is repeated by itself. Raises
        :class:`~vcasgd.errors.SpecError` for the wrong field,
        :class:`~vcasgd.errors.PackageError`, and :class:`~vcasgd.errors.Conflict` if the key
        belongs to another job.
        """
        values = read_secrets(spec, secrets)
        return submitted(self._api, spec, self.upload(package), values, idempotency_key)

    def submit_directory(
        self,
        spec: JobSpec,
        limit_mb: float = PACKAGE_LIMIT_MB,
        idempotency_key: str | None = None,
    ) -> Job:
        """Check the spec's working directory, pack it, and submit it.

        Raises the errors of :meth:`submit` and :func:`packed`.
        """
        return self.submit(spec, packed(spec, limit_mb), idempotency_key)

    def upload(self, package: bytes) -> str:
        """Upload a package unless the API has it, and return its digest.

        Raises :class:`~vcasgd.errors.PackageError`.
        """
        digest = digest_of(package)
        try:
            self._api.call("HEAD", f"packages/{digest}")
        except NotFound:
            self._api.call("PUT", f"packages/{digest}", content=package, timeout=FILE_SECONDS)
        return digest

    def job(self, job: str) -> Job:
        """Return a job, by its ID, or by its name or the start of its ID if only one job has that.

        Raises :class:`~vcasgd.errors.Conflict` if several jobs have.
        """
        try:
            return self._api.get(Job, path_of("jobs", job)).bound(self._api)
        except NotFound as error:
            # Every ID starts with an empty text, such as that of an unset variable.
            found = self._jobs_called(job) if job else []
            if not found:
                raise NotFound(
                    f"there is no job {job or 'with an empty name'}", remedy=error.remedy or _LISTED
                ) from error
        if len(found) > 1:
            several = ", ".join(f"{one.id} ({one.state})" for one in found[:MAX_NAMED])
            rest = f", and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
            raise Conflict(
                f"{job} can be {len(found)} jobs: {several}{rest}", remedy="use the ID of one"
            )
        return found[0]

    def _jobs_called(self, text: str) -> list[Job]:
        """Return the jobs that a text can mean: by their names, or by the start of their IDs."""
        # An older API lists other jobs, too.
        pages = self._api.linked_pages(Job, "jobs", limit=PAGE, prefix=text)
        jobs = [job.bound(self._api) for job in pages]
        named = [job for job in jobs if job.name == text]
        started = [job for job in jobs if job.id.startswith(text)]
        if named:
            # An ID starts with the job's name. Jobs with longer names, such as digits-2 beside
            # digits, aren't meant by that; those with shorter ones are, by a part of their IDs.
            started = [job for job in started if not job.name.startswith(text)]
        return [*named, *started]

    def jobs(self, state: str | None = None, limit: int | None = None) -> list[Job]:
        """Return jobs, newest first; all of them without a ``limit``.

        ``state``: only jobs in this state; ``active`` stands for all that have not ended,
        ``queued`` for those that have no machine yet.
        """
        pages = self._api.linked_pages(Job, "jobs", limit=min(limit or PAGE, PAGE), state=state)
        return [job.bound(self._api) for job in islice(pages, limit)]

    def validate(self, text: str) -> Validation:
        """Check the text of a job file. This submits nothing."""
        return self._api.post(Validation, "jobs/validate", {"yaml": text})

    def job_schema(self) -> dict[str, Any]:
        """Return the JSON schema of a job file."""
        return self._api.get(dict[str, Any], "schema/job")

    def plan(
        self,
        spec: JobSpec,
        *,
        samples: int | None = None,
        samples_per_second: float | None = None,
        parameters: int | None = None,
    ) -> PlanView:
        """Estimate what a job would buy now, how long it would take, and what it would cost.

        This buys nothing. ``samples`` per epoch, ``samples_per_second`` of one machine, and
        ``parameters`` of the model replace measurements of earlier jobs with the same name and
        task. Raises
        :class:`~vcasgd.errors.Conflict` if no controller has reported its pools yet.
        """
        body = {
            "spec": spec.model_dump(mode="json"),
            "samples": samples,
            "samples_per_second": samples_per_second,
            "parameters": parameters,
        }
        return self._api.post(PlanView, "plan", body)

    # -- tokens -----------------------------------------------------------------------------

    def me(self) -> CallerView:
        """Return the name, scope, and limits of this client's token."""
        return self._api.get(CallerView, "me")

    def tokens(self) -> list[TokenView]:
        """Return all API tokens, without their secrets."""
        return self._api.get(list[TokenView], "tokens")

    def create_token(
        self,
        name: str,
        scope: Scope | str,
        *,
        max_machines: int | None = None,
        max_usd_per_month: float | None = None,
        expires: float | str | None = None,
        pool: str | None = None,
    ) -> NewToken:
        """Create a token for a user. Its secret is in ``token``, and can't be read again.

        ``expires`` is its lifetime in seconds, or as text such as ``30d``. ``pool`` is what
        machines join with scope ``join``. Raises
        :class:`~vcasgd.errors.Conflict` if the name is taken.
        """
        body = {
            "name": name, "scope": scope, "max_machines": max_machines,
            "max_usd_per_month": max_usd_per_month, "expires": expires, "pool": pool,
        }  # fmt: skip
        return self._api.post(NewToken, "tokens", body)

    def revoke_token(self, name: str) -> None:
        """Revoke a token. It stops working within seconds, also in open streams."""
        self._api.call("DELETE", path_of("tokens", name))

    # -- the platform -----------------------------------------------------------------------

    def changes(
        self,
        after: str | None = None,
        patience: float = PATIENCE_SECONDS,
        silence: float = SILENCE_SECONDS,
    ) -> Iterator[StreamMessage]:
        """Yield the state of the platform, and then its changes and events, indefinitely.

        ``after`` is the ID of an earlier entry: events after it are included. Broken connections
        are resumed as for :meth:`Job.events`. ``silence``: seconds without data after which a
        connection counts as broken.
        """
        stream = self._api.event_stream("stream")
        for message in messages(stream, after, patience, silence=silence):
            # a newer API may send other types
            if data := _STREAM_DATA.get(message.event):
                entry = {"id": message.id, "type": message.event}
                yield StreamMessage.model_validate(
                    {**entry, "data": data.model_validate_json(message.data)}
                )

    def status(self) -> StatusView:
        """Return the state of the whole platform."""
        return self._api.get(StatusView, "status")

    def spend(self) -> SpendView:
        """Return the current cost of all machines per hour, and the cost of all jobs so far."""
        return self._api.get(SpendView, "fleet/spend")

    def machines(self) -> list[Machine]:
        """Return the machines, as the controller last observed them."""
        return self._api.get(list[Machine], "machines")

    def workers(self) -> list[WorkerRow]:
        """Return the last heartbeats of the workers of all active jobs."""
        return self._api.get(list[WorkerRow], "workers")

    def pools(self) -> list[PoolRow]:
        """Return the pools of machines, as the controller last observed them."""
        return self._api.get(list[PoolRow], "pools")

    def store(self) -> StoreView:
        """Return memory, load, queues, and replication of the store's servers."""
        return self._api.get(StoreView, "store")

    def evict(
        self,
        worker: str | None = None,
        machine: str | None = None,
        *,
        notice_seconds: float | None = None,
        kill: bool = False,
    ) -> EvictionRequested:
        """Take a machine, or the machine of a worker.

        It gets the usual notice of its cloud, one of ``notice_seconds``, or none with ``kill``. The
        controller does that soon; :meth:`request` returns the result.
        """
        if (worker is None) == (machine is None):
            raise ValueError("name either a worker or a machine")
        body = {"notice_seconds": notice_seconds, "kill": kill}
        parts = ("workers", worker) if worker else ("machines", machine or "")
        return self._api.post(EvictionRequested, path_of(*parts, "evict"), body)

    def request(self, request: str) -> EvictionRequested:
        """Return the result of :meth:`evict`, given its ID."""
        return self._api.get(EvictionRequested, path_of("requests", request))
