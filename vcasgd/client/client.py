"""One class over the REST API."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from vcasgd.client.downloads import save
from vcasgd.client.following import PATIENCE_SECONDS
from vcasgd.client.job import Job
from vcasgd.client.problems import may_work_later
from vcasgd.client.tensorboard import EventFiles
from vcasgd.client.transport import FILE_SECONDS, Transport, path_of
from vcasgd.client.views import Event, LogLine, Row, from_row
from vcasgd.errors import ApiError, NotFound
from vcasgd.spec.job import JobSpec
from vcasgd.task.package import digest_of, pack

#: between two looks at a job that is waited for
LOOK_SECONDS = 0.5
#: of a long history, in event files: TensorBoard itself shows a thousand of each curve
HISTORY_POINTS = 5000
#: between two looks for what is new, for event files
FRESH_SECONDS = 2.0
#: unless told otherwise, how much a working directory may hold
PACKAGE_LIMIT_MB = 100.0


class Client:
    """A connection to one API. May be shared by threads; close it, or use it in ``with``.

    Every method raises :class:`~vcasgd.errors.ApiError` where there is no answer,
    :class:`~vcasgd.errors.Unauthorized` where the token is wrong and
    :class:`~vcasgd.errors.NotFound` where there is no such job, worker or checkpoint.
    """

    def __init__(self, url: str, token: str, timeout: float = 30.0) -> None:
        self._api = Transport(url, token, timeout)

    def __repr__(self) -> str:
        return f"Client({self._api.url!r})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._api.close()

    # -- jobs -------------------------------------------------------------------------------

    def submit(self, spec: JobSpec, package: bytes, idempotency_key: str | None = None) -> Job:
        """Uploads the package unless it is known, and creates a job; the same key again gives
        the same job.

        Raises :class:`~vcasgd.errors.SpecError` that names the wrong field,
        :class:`~vcasgd.errors.PackageError`, and :class:`~vcasgd.errors.Conflict` where the
        key was used for something else.
        """
        digest = self.upload(package)
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        body = {"spec": spec.model_dump(mode="json"), "package": digest}
        return self._job(self._api.json("POST", "jobs", json=body, headers=headers))

    def submit_directory(
        self,
        spec: JobSpec,
        limit_mb: float = PACKAGE_LIMIT_MB,
        idempotency_key: str | None = None,
    ) -> Job:
        """Packs the spec's working directory and submits it. Raises as :meth:`submit` does."""
        package = pack(Path(spec.working_dir), int(limit_mb * 1e6))
        return self.submit(spec, package, idempotency_key)

    def upload(self, package: bytes) -> str:
        """Makes a package known; returns its digest. Raises
        :class:`~vcasgd.errors.PackageError`."""
        digest = digest_of(package)
        try:
            self._api.call("HEAD", f"packages/{digest}")
        except NotFound:
            self._api.call("PUT", f"packages/{digest}", content=package, timeout=FILE_SECONDS)
        return digest

    def jobs(self, state: str | None = None, limit: int = 100) -> list[Job]:
        """Newest first."""
        rows = self._api.rows("jobs", limit=limit, state=state)
        return [self._job(row) for row in rows]

    def job(self, job: str) -> Job:
        return self._job(self._api.json("GET", path_of("jobs", job)))

    def pause(self, job: str) -> Job:
        """Raises :class:`~vcasgd.errors.Conflict` where the job is not running."""
        return self._command(job, "pause")

    def resume(self, job: str, max_cost_usd: float | None = None) -> Job:
        """With another budget if one is given. Raises :class:`~vcasgd.errors.Conflict` where the
        job is not paused."""
        body = None if max_cost_usd is None else {"max_cost_usd": max_cost_usd}
        return self._command(job, "resume", body)

    def cancel(self, job: str) -> Job:
        """Raises :class:`~vcasgd.errors.Conflict` where the job is over."""
        return self._command(job, "cancel")

    def wait(
        self, job: str, timeout: float | None = None, patience: float = PATIENCE_SECONDS
    ) -> Job:
        """The job once it is over, after ``timeout`` seconds at most; without one, however long it
        takes. The API may be away in between, for ``patience`` seconds.

        Raises :class:`~vcasgd.errors.ApiError` where it is not over in time.
        """
        started = answered = time.monotonic()
        while True:
            try:
                view = self.job(job)
                answered = time.monotonic()
                if view.over:
                    return view
            except ApiError as error:
                if not may_work_later(error) or time.monotonic() > answered + patience:
                    raise
            if timeout is not None and time.monotonic() + LOOK_SECONDS > started + timeout:
                raise ApiError(f"job {job} is not over after {timeout:g} s")
            time.sleep(LOOK_SECONDS)

    def validate(self, text: str) -> Row:
        """Whether a YAML text is a job: ``valid``, ``errors`` (``path``, ``message``, ``remedy``,
        ``line`` each), ``spec``. Nothing is submitted."""
        row: Row = self._api.json("POST", "jobs/validate", json={"yaml": text})
        return row

    def job_schema(self) -> Row:
        """The JSON schema of a job file."""
        return self._api.row("schema/job")

    # -- money ------------------------------------------------------------------------------

    def cost(self, job: str) -> Row:
        """What its machines have cost so far, in USD: ``spent_usd``, ``on_demand_usd``,
        ``saved_usd``, ``pools``, ``wasted``."""
        row: Row = self._api.json("GET", path_of("jobs", job, "cost"))
        return row

    def spend(self) -> Row:
        """What the fleet costs an hour and has cost, in USD: ``usd_per_hour``, ``spent_usd``,
        ``saved_usd``, ``pools`` with their ``offers``."""
        return self._api.row("fleet/spend")

    def plan(
        self,
        spec: JobSpec,
        *,
        samples: int | None = None,
        samples_per_second: float | None = None,
    ) -> Row:
        """What a job would buy now, how long it would take and what it would cost: ``offers``,
        ``pools``, ``usd_per_hour``, ``hours``, ``cost_usd``, ``assumptions``, ``remedies``.

        Nothing is bought. ``samples``: of an epoch; ``samples_per_second``: of one machine; else
        as earlier jobs of the same name and task had. Raises :class:`~vcasgd.errors.Conflict`
        where no controller has told which pools there are.
        """
        given: Row = {"samples": samples, "samples_per_second": samples_per_second}
        body = {name: value for name, value in given.items() if value is not None}
        body["spec"] = spec.model_dump(mode="json")
        row: Row = self._api.json("POST", "plan", json=body)
        return row

    # -- what a job says ----------------------------------------------------------------------

    def events(
        self,
        job: str,
        after: str | None = None,
        follow: bool = False,
        patience: float = PATIENCE_SECONDS,
    ) -> Iterator[Event]:
        """What happened after an id, oldest first; with ``follow`` until the job is over.

        Broken connections are mended without loss or repetition; after ``patience`` seconds
        without success :class:`~vcasgd.errors.ApiError` is raised.
        """
        for row in self._api.history(path_of("jobs", job, "events"), after, follow, patience):
            yield from_row(Event, row)

    def logs(
        self,
        job: str,
        after: str | None = None,
        follow: bool = False,
        patience: float = PATIENCE_SECONDS,
    ) -> Iterator[LogLine]:
        """Lines that workers printed, as :meth:`events`."""
        for row in self._api.history(path_of("jobs", job, "logs"), after, follow, patience):
            yield from_row(LogLine, row)

    def metrics(
        self,
        job: str,
        after: str | None = None,
        *,
        points: int | None = None,
        names: Sequence[str] = (),
    ) -> list[Row]:
        """The totals over time, oldest first, as ``pandas.DataFrame`` takes them; each has an
        ``id``. ``points``: at most so many, spikes included; ``names``: of the fields wanted."""
        path, fields = path_of("jobs", job, "metrics"), ",".join(names) or None
        if points is None:
            return list(self._api.pages(path, after, names=fields))
        return self._api.rows(path, after=after, points=points, names=fields)

    def staleness(self, job: str) -> Row:
        """Of all updates: ``buckets`` (``staleness`` and ``updates`` each), ``mean``, ``max``."""
        return self._api.row(path_of("jobs", job, "staleness"))

    def machines(self, job: str) -> list[Row]:
        """What each machine did for the job: ``instance``, ``spans`` (``state``, ``from``,
        ``to``), ``replaced_by``, ``reason``, ``lost``."""
        return self._api.rows(path_of("jobs", job, "machines"))

    def subtasks(self, job: str, epoch: int | None = None) -> Row:
        """``states``: a letter for each subtask of an epoch (from 1; else the one at work): ``o``
        open, ``l`` leased, ``r`` leased again, ``p`` applied in part, ``a`` applied."""
        return self._api.row(path_of("jobs", job, "subtasks"), epoch=epoch)

    def spec(self, job: str) -> str:
        """The job as YAML."""
        return self._api.call("GET", path_of("jobs", job, "spec")).text

    def workers(self, job: str | None = None) -> list[Row]:
        """Last heartbeats: of one job's workers, else of those of all active jobs."""
        return self._api.rows("workers" if job is None else path_of("jobs", job, "workers"))

    def checkpoints(self, job: str) -> list[Row]:
        """Oldest first: ``name``, ``version``, ``digest``, ``size``."""
        return self._api.rows(path_of("jobs", job, "checkpoints"))

    def download(self, job: str, path: Path, checkpoint: str | None = None) -> Path:
        """The finished model, or one checkpoint, as a safetensors file; returns where it is.

        A directory gets the file under the checkpoint's name. The file appears whole or not
        at all. Raises :class:`~vcasgd.errors.Conflict` where there is no model yet and
        :class:`~vcasgd.errors.CheckpointDamaged` where a digest does not match.
        """
        parts = ("model",) if checkpoint is None else ("checkpoints", checkpoint)
        with self._api.stream(
            path_of("jobs", job, *parts), silence_seconds=FILE_SECONDS
        ) as response:
            return save(response, path)

    def tensorboard(self, job: str, folder: Path, follow: bool = False) -> Path:
        """A job's history as TensorBoard event files in a folder of its own inside ``folder``;
        returns that folder. With ``follow`` until the job is over.

        Needs ``pip install 'vcasgd[tensorboard]'``; :class:`~vcasgd.errors.ApiError` says so.
        """
        target = folder / job
        with EventFiles(target) as files:
            view, last = self.job(job), None
            points: int | None = HISTORY_POINTS
            while True:
                rows = self.metrics(job, last, points=points)
                files.add_points(rows)
                files.add_evaluations(view.evaluations)
                if view.over or not follow:
                    return target
                last, points = (rows[-1]["id"] if rows else last), None
                time.sleep(FRESH_SECONDS)
                view = self.job(job)

    # -- the fleet ------------------------------------------------------------------------------

    def instances(self) -> list[Row]:
        """Machines as the controller sees them."""
        return self._api.rows("instances")

    def pools(self) -> list[Row]:
        """Places to buy machines, as the controller sees them."""
        return self._api.rows("pools")

    def store(self) -> Row:
        """``nodes`` and ``ledger``: memory, load, queues, replication."""
        return self._api.row("store")

    def changes(
        self, after: str | None = None, patience: float = PATIENCE_SECONDS
    ) -> Iterator[tuple[str, Row]]:
        """What is, and then what changes, for ever: pairs of a type (``job``, ``fleet``,
        ``store``, ``event``) and its data. Broken connections are mended, as for
        :meth:`events`."""
        return self._api.changes("stream", after, patience)

    def servers(self) -> list[Row]:
        """Parameter servers: their last heartbeats."""
        return self._api.rows("servers")

    def status(self) -> Row:
        """The platform as a whole: ``version``, ``controller``, ``active_jobs``, …"""
        status: Row = self._api.json("GET", "status")
        return status

    def evict(
        self,
        worker: str | None = None,
        instance: str | None = None,
        *,
        notice_seconds: float | None = None,
        kill: bool = False,
    ) -> Row:
        """Takes the machine of a worker, or an instance: with the notice that is usual in its
        cloud, with another one, or (``kill``) with none. Returns what was asked."""
        if (worker is None) == (instance is None):
            raise ValueError("name either a worker or an instance")
        wanted = {"notice_seconds": notice_seconds, "kill": kill or None}
        body = {name: value for name, value in wanted.items() if value is not None}
        parts = ("workers", worker) if worker else ("instances", instance or "")
        request: Row = self._api.json("POST", path_of(*parts, "evict"), json=body)
        return request

    def _command(self, job: str, command: str, body: Row | None = None) -> Job:
        more = {} if body is None else {"json": body}
        return self._job(self._api.json("POST", path_of("jobs", job, command), **more))

    def _job(self, row: Row) -> Job:
        return Job.from_json(row, client=self)
