"""A job as one object of a program or a notebook."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import PrivateAttr

from vcasgd.client.following import PATIENCE_SECONDS, messages, retried
from vcasgd.client.model_files import finish, load_module
from vcasgd.client.secrets import read_secrets
from vcasgd.client.tracking import export
from vcasgd.client.transport import BUSY_SECONDS, Transport, path_of
from vcasgd.errors import ApiError, Conflict
from vcasgd.schemas.costs import CostView
from vcasgd.schemas.fleet import ShellAccess, WorkerRow
from vcasgd.schemas.history import (
    LAST,
    CheckpointRow,
    EventRow,
    LogRow,
    MetricRow,
    StalenessView,
    SubtasksView,
    TimelineView,
)
from vcasgd.schemas.jobs import JobView
from vcasgd.spec.job import LENGTHS, JobSpec
from vcasgd.spec.sections import PROJECT, StartFrom

if TYPE_CHECKING:
    from torch.nn import Module

#: Seconds between two looks at a job that a caller waits for.
POLL_SECONDS = 1.0
#: Seconds for which a submission is repeated if the API, which just answered, is away.
SUBMIT_SECONDS = 15.0

Entry = TypeVar("Entry", EventRow, LogRow)


class Job(JobView):
    """Immutable snapshot of a job, with methods to query and control it.

    :meth:`refreshed`, :meth:`wait`, and the commands return a new snapshot. Methods raise
    :class:`~vcasgd.errors.ApiError` if the API does not answer,
    :class:`~vcasgd.errors.Unauthorized` if the token is wrong, and
    :class:`~vcasgd.errors.NotFound` if the job or the checkpoint does not exist.
    """

    _api: Transport = PrivateAttr()

    def __str__(self) -> str:
        best = f", best {self.best}" if self.best else ""
        return f"{self.id} {self.state}, {self.progress.fraction:.0%} done{best}"

    def bound(self, api: Transport) -> Job:
        """Set the connection that the methods use, and return the job."""
        self._api = api
        return self

    def refreshed(self) -> Job:
        """Return the current state of the job."""
        return self._refreshed(math.inf)

    def _refreshed(self, left: float) -> Job:
        patience = min(BUSY_SECONDS, left)
        return self._api.get(Job, self._path(), patience=patience).bound(self._api)

    def wait(self, timeout: float | None = None, patience: float = PATIENCE_SECONDS) -> Job:
        """Return the job once it has ended, after at most ``timeout`` seconds.

        The API may be unavailable for ``patience`` seconds meanwhile. Raises
        :class:`~vcasgd.errors.ApiError` if the job has not ended in time.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        left = deadline - time.monotonic()
        # a stream would tell it at once, but a token has few of them
        while not (job := retried(partial(self._refreshed, left), min(patience, left))).over:
            if (left := deadline - time.monotonic()) <= 0:
                raise ApiError(f"job {self.id} has not ended after {timeout:g} s")
            time.sleep(min(POLL_SECONDS, left))
        return job

    # -- commands -----------------------------------------------------------------------------

    def pause(self) -> Job:
        """Pause the job. Raises :class:`~vcasgd.errors.Conflict` if it is not running."""
        return self._command("pause")

    def resume(self, max_cost_usd: float | None = None) -> Job:
        """Resume the job, optionally with a new budget for the whole job.

        Raises :class:`~vcasgd.errors.Conflict` if it is not paused.
        """
        return self._command("resume", {"max_cost_usd": max_cost_usd})

    def change(self, **fields: Any) -> Job:
        """Change the ``priority`` or the ``weight`` of the job.

        Raises :class:`~vcasgd.errors.Conflict` if it has ended, and
        :class:`~vcasgd.errors.SpecError` for another field or an invalid value.
        """
        return self._api.patch(Job, self._path(), fields).bound(self._api)

    def cancel(self) -> Job:
        """Cancel the job. Raises :class:`~vcasgd.errors.Conflict` if it has ended."""
        return self._command("cancel")

    def delete(self) -> None:
        """Delete the job, with its history, checkpoints, and model.

        Raises :class:`~vcasgd.errors.Conflict` if it has not ended.
        """
        self._api.call("DELETE", self._path())

    # -- history ------------------------------------------------------------------------------

    def events(
        self, after: str | None = None, follow: bool = False, patience: float = PATIENCE_SECONDS
    ) -> Iterator[EventRow]:
        """Yield the events after an ID, oldest first; with ``follow`` until the job ends.

        Broken connections are resumed without loss or repetition. After ``patience`` seconds
        without a connection, the iterator raises :class:`~vcasgd.errors.ApiError`.
        """
        return self._entries(EventRow, "events", after, follow, patience)

    def logs(
        self,
        after: str | None = None,
        follow: bool = False,
        patience: float = PATIENCE_SECONDS,
        *,
        tail: int | None = None,
        worker: str | None = None,
        since: float | None = None,
        grep: str | None = None,
    ) -> Iterator[LogRow]:
        """Yield the lines that workers printed and logged, like :meth:`events`.

        ``tail``: only the last lines, so many. ``worker``: only of workers with this in their name.
        ``since``: only since this time, in Unix seconds. ``grep``: only lines with this text.
        """
        query = {"tail": tail, "worker": worker, "since": since, "grep": grep}
        return self._entries(LogRow, "logs", after, follow, patience, **query)

    def metrics(
        self, after: str | None = None, *, points: int | None = None, names: Sequence[str] = ()
    ) -> list[MetricRow]:
        """Return the metrics over time, oldest first.

        ``points`` thins the history to at most this many points, and keeps spikes. ``names``
        selects fields; the others are then unset.
        """
        path, fields = self._path("metrics"), ",".join(names) or None
        if points is None:
            return list(self._api.pages(MetricRow, path, after, names=fields))
        return self._api.get(list[MetricRow], path, after=after, points=points, names=fields)

    def staleness(self) -> StalenessView:
        """Return the staleness of all updates: histogram, mean, and maximum."""
        return self._api.get(StalenessView, self._path("staleness"))

    def timelines(self) -> list[TimelineView]:
        """Return what each machine did for the job, over time."""
        return self._api.get(list[TimelineView], self._path("timelines"))

    def subtasks(self, epoch: int | None = None, letters: int | None = None) -> SubtasksView:
        """Return the states of the subtasks of an epoch: by default, of the current one.

        If it has more than ``letters``, by default 10,000, each letter stands for several of them.
        """
        return self._api.get(SubtasksView, self._path("subtasks"), epoch=epoch, letters=letters)

    def file(self) -> str:
        """Return the job file as YAML, with all defaults."""
        return self._api.call("GET", self._path("spec")).text

    def workers(self) -> list[WorkerRow]:
        """Return the last heartbeats of the job's workers."""
        return self._api.get(list[WorkerRow], self._path("workers"))

    def shell(self, worker: str | None = None, command: Sequence[str] = ()) -> ShellAccess:
        """Return how to run a command, or a shell, beside a worker; the job's events record it.

        Raises :class:`~vcasgd.errors.Conflict` where the worker's pool doesn't allow it.
        """
        body = {"worker": worker, "command": list(command)}
        return self._api.post(ShellAccess, self._path("exec"), body)

    def cost(self) -> CostView:
        """Return the cost of the job's machines so far."""
        return self._api.get(CostView, self._path("cost"))

    # -- files --------------------------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointRow]:
        """Return the job's checkpoints, oldest first."""
        return self._api.get(list[CheckpointRow], self._path("checkpoints"))

    def download(
        self,
        path: Path,
        checkpoint: str | None = None,
        *,
        trained_only: bool = False,
        ema: bool = False,
        working_dir: Path | None = None,
    ) -> Path:
        """Download the finished model, or a checkpoint, as a safetensors file.

        ``checkpoint``: a name, a version, ``best``, or ``last``. Without it, the finished model
        is the best one if a metric ranks the job's models, else the last one.

        The file is the whole state dict, with the model's base. A base that is not in the job file
        is built by the task in ``working_dir``, which runs its code on this computer. Of a PEFT
        model, this is a folder with its adapter. With ``trained_only``, it is always the file that
        the API has, without the base. With ``ema``, parameters are their moving average, which the
        job must keep.

        Returns the path; in an existing folder, it has the checkpoint's name. Missing folders are
        created. The file appears once it is complete. Raises :class:`~vcasgd.errors.Conflict` if
        there is no model yet, :class:`~vcasgd.errors.CheckpointDamaged` if a digest does not match,
        and :class:`~vcasgd.errors.SpecError` if the base is not found.
        """
        parts = ("model",) if checkpoint is None else ("checkpoints", checkpoint)
        folder = path if path.is_dir() else path.parent
        folder.mkdir(parents=True, exist_ok=True)
        if trained_only:
            return self._api.download(self._path(*parts), path)
        with TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
            file = self._api.download(self._path(*parts), Path(scratch))
            target = path / file.name if path.is_dir() else path
            return finish(file, target, self.spec, working_dir, ema=ema)

    def load(self, checkpoint: str | None = None) -> Module:
        """Return the task's module with the weights of the finished model, or of a checkpoint.

        This runs the job's code on this computer, which needs its libraries. ``checkpoint`` is
        that of :meth:`download`. Raises the errors of :meth:`download`, and those of a task that
        can't be loaded.
        """
        with TemporaryDirectory(prefix="vcasgd-load-") as scratch:
            code = self._api.call("GET", path_of("packages", self.package)).content
            file = self.download(Path(scratch), checkpoint, trained_only=True)
            return load_module(self.spec, self.package, code, file)

    def extend(self, epochs: int, secrets: Mapping[str, str] | None = None) -> Job:
        """Submit a job that trains the last model of this one, which has ended, on.

        It has the same package and settings, and ``epochs`` epochs of its own: its schedule runs
        over them from the start, and its optimizer is new. ``secrets`` are those of
        :meth:`vcasgd.Client.submit`. Raises :class:`~vcasgd.errors.Conflict` if this job has no
        finished model.
        """
        spec = self.extended(epochs)
        return submitted(self._api, spec, self.package, read_secrets(spec, secrets))

    def extended(self, epochs: int) -> JobSpec:
        """Return the specification that :meth:`extend` submits. Raises as that does."""
        if (now := self.refreshed()).model is None:
            other = "submit a job with start_from, if it has checkpoints"
            raise Conflict(
                f"job {self.id} has no finished model",
                remedy=other if now.over else "wait for its end",
            )
        return self.spec.model_copy(
            update={
                **dict.fromkeys(LENGTHS),
                "epochs": epochs,
                "start_from": StartFrom(job=self.id, checkpoint=LAST),
            }
        )

    def track(
        self,
        to: str,
        *,
        folder: Path = Path("runs"),
        project: str = PROJECT,
        follow: bool = False,
    ) -> str:
        """Export the job's history to a tracker, and continue where the last export ended.

        With ``follow``, new points follow until the job ends, and with them those of the workers'
        processors, memory, and network. ``folder`` is for the files of TensorBoard and W&B, in a
        folder of the job's name; ``project`` is the project of W&B and the experiment of MLflow.
        Returns the folder or the address of the run. Raises :class:`~vcasgd.errors.SpecError` if
        there is no such tracker or its library is not installed, and
        :class:`~vcasgd.errors.ApiError` if the tracker refuses the run.
        """
        return export(self, to, folder, project, follow=follow)

    def _path(self, *parts: str) -> str:
        return path_of("jobs", self.id, *parts)

    def _command(self, command: str, body: dict[str, Any] | None = None) -> Job:
        return self._api.post(Job, self._path(command), body).bound(self._api)

    def _entries(
        self,
        kind: type[Entry],
        name: str,
        after: str | None,
        follow: bool,
        patience: float,
        **query: Any,
    ) -> Iterator[Entry]:
        path = self._path(name)
        if not follow:
            yield from self._api.pages(kind, path, after, **query)
            return
        stream = self._api.event_stream(path, **query)
        for message in messages(stream, after, patience):
            yield kind.model_validate_json(message.data)


def submitted(
    api: Transport,
    spec: JobSpec,
    package: str,
    secrets: Mapping[str, str],
    idempotency_key: str | None = None,
) -> Job:
    """Create a job of an uploaded package; repeat the request if its answer is lost."""
    headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
    body = {"spec": spec.model_dump(mode="json"), "package": package}
    if secrets:
        body["secrets"] = dict(secrets)
    post = partial(api.post, Job, "jobs", body, headers=headers)
    return retried(post, SUBMIT_SECONDS).bound(api)
