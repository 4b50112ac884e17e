"""Calls about one job, and a job as one object of a program or a notebook."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import PrivateAttr

from vcasgd.client.following import PATIENCE_SECONDS, messages, retried
from vcasgd.client.model_files import finish
from vcasgd.client.tracking import new_points, open_tracker, tracker_kind, worker_points
from vcasgd.client.transport import Transport, path_of
from vcasgd.errors import ApiError
from vcasgd.schemas.costs import CostView
from vcasgd.schemas.fleet import WorkerRow
from vcasgd.schemas.history import (
    CheckpointRow,
    EventRow,
    LogRow,
    MachineView,
    MetricRow,
    StalenessView,
    SubtasksView,
)
from vcasgd.schemas.jobs import JobView
from vcasgd.spec.track import PROJECT, TrackerKind

#: Points of a long history for trackers; TensorBoard itself shows a thousand of each curve.
HISTORY_POINTS = 5000
#: Points that are written before their position.
POINTS_AT_ONCE = 500
#: Seconds between two reads of new points for trackers.
REFRESH_SECONDS = 2.0
#: Seconds between two points of the workers' own metrics.
SYSTEM_SECONDS = 10.0


class JobCalls:
    """Calls of the API about one job, which they take by its ID.

    Every method raises :class:`~vcasgd.errors.ApiError` if the API does not answer,
    :class:`~vcasgd.errors.Unauthorized` if the token is wrong, and
    :class:`~vcasgd.errors.NotFound` if the job or the checkpoint does not exist.
    """

    def __init__(self, api: Transport) -> None:
        self._api = api

    def job(self, job: str) -> Job:
        """Return a job."""
        return self._bound(self._api.get(Job, path_of("jobs", job)))

    def wait(
        self, job: str, timeout: float | None = None, patience: float = PATIENCE_SECONDS
    ) -> Job:
        """Return the job once it has ended, after at most ``timeout`` seconds.

        The API may be unavailable for ``patience`` seconds meanwhile. Raises
        :class:`~vcasgd.errors.ApiError` if the job has not ended in time.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        stream = self._api.event_stream(path_of("jobs", job, "events"))
        for _ in messages(stream, None, patience, deadline=deadline):
            pass
        view = retried(lambda: self.job(job), patience)
        if not view.over:
            raise ApiError(f"job {job} has not ended after {timeout:g} s")
        return view

    def pause(self, job: str) -> Job:
        """Pause a job. Raises :class:`~vcasgd.errors.Conflict` if it is not running."""
        return self._command(job, "pause")

    def resume(self, job: str, max_cost_usd: float | None = None) -> Job:
        """Resume a job, optionally with a new budget for the whole job.

        Raises :class:`~vcasgd.errors.Conflict` if it is not paused.
        """
        body = None if max_cost_usd is None else {"max_cost_usd": max_cost_usd}
        return self._command(job, "resume", body)

    def change(self, job: str, **fields: Any) -> Job:
        """Change the ``priority`` or the ``weight`` of a job.

        Raises :class:`~vcasgd.errors.Conflict` if the job has ended, and
        :class:`~vcasgd.errors.SpecError` for another field or an invalid value.
        """
        return self._bound(self._api.patch(Job, path_of("jobs", job), fields))

    def cancel(self, job: str) -> Job:
        """Cancel a job. Raises :class:`~vcasgd.errors.Conflict` if it has ended."""
        return self._command(job, "cancel")

    def delete(self, job: str) -> None:
        """Delete a job that has ended, with its history, checkpoints, and model.

        Raises :class:`~vcasgd.errors.Conflict` if it has not ended.
        """
        self._api.call("DELETE", path_of("jobs", job))

    def events(
        self,
        job: str,
        after: str | None = None,
        follow: bool = False,
        patience: float = PATIENCE_SECONDS,
    ) -> Iterator[EventRow]:
        """Yield the events after an ID, oldest first; with ``follow`` until the job ends.

        Broken connections are resumed without loss or repetition. After ``patience`` seconds
        without a connection, the iterator raises :class:`~vcasgd.errors.ApiError`.
        """
        path = path_of("jobs", job, "events")
        if not follow:
            yield from self._api.pages(EventRow, path, after)
            return
        for message in messages(self._api.event_stream(path), after, patience):
            yield EventRow.model_validate_json(message.data)

    def logs(
        self,
        job: str,
        after: str | None = None,
        follow: bool = False,
        patience: float = PATIENCE_SECONDS,
    ) -> Iterator[LogRow]:
        """Yield the lines that workers printed, like :meth:`events`."""
        path = path_of("jobs", job, "logs")
        if not follow:
            yield from self._api.pages(LogRow, path, after)
            return
        for message in messages(self._api.event_stream(path), after, patience):
            yield LogRow.model_validate_json(message.data)

    def metrics(
        self,
        job: str,
        after: str | None = None,
        *,
        points: int | None = None,
        names: Sequence[str] = (),
    ) -> list[MetricRow]:
        """Return the metrics over time, oldest first.

        ``points`` thins the history to at most this many points, and keeps spikes. ``names``
        selects fields; the others are then unset.
        """
        path, fields = path_of("jobs", job, "metrics"), ",".join(names) or None
        if points is None:
            return list(self._api.pages(MetricRow, path, after, names=fields))
        return self._api.get(list[MetricRow], path, after=after, points=points, names=fields)

    def staleness(self, job: str) -> StalenessView:
        """Return the staleness of all updates: histogram, mean, and maximum."""
        return self._api.get(StalenessView, path_of("jobs", job, "staleness"))

    def machines(self, job: str) -> list[MachineView]:
        """Return the machines of the job, with their states over time."""
        return self._api.get(list[MachineView], path_of("jobs", job, "machines"))

    def subtasks(
        self, job: str, epoch: int | None = None, letters: int | None = None
    ) -> SubtasksView:
        """Return the states of the subtasks of an epoch: by default, of the current one.

        If it has more than ``letters``, by default 10,000, each letter stands for several of them.
        """
        path = path_of("jobs", job, "subtasks")
        return self._api.get(SubtasksView, path, epoch=epoch, letters=letters)

    def spec(self, job: str) -> str:
        """Return the job's file as YAML."""
        return self._api.call("GET", path_of("jobs", job, "spec")).text

    def workers(self, job: str | None = None) -> list[WorkerRow]:
        """Return the last heartbeats of a job's workers, or of those of all active jobs."""
        path = "workers" if job is None else path_of("jobs", job, "workers")
        return self._api.get(list[WorkerRow], path)

    def cost(self, job: str) -> CostView:
        """Return the cost of the job's machines so far."""
        return self._api.get(CostView, path_of("jobs", job, "cost"))

    def checkpoints(self, job: str) -> list[CheckpointRow]:
        """Return the job's checkpoints, oldest first."""
        return self._api.get(list[CheckpointRow], path_of("jobs", job, "checkpoints"))

    def download(
        self,
        job: str,
        path: Path,
        checkpoint: str | None = None,
        *,
        trained_only: bool = False,
        working_dir: Path | None = None,
    ) -> Path:
        """Download the finished model, or a checkpoint, as a safetensors file.

        The file is the whole state dict, with the model's base. A base that is not in the job file
        is built by the task in ``working_dir``, which runs its code on this computer. Of a PEFT
        model, this is a folder with its adapter. With ``trained_only``, it is always the file that
        the API has, without the base.

        Returns the path; in an existing folder, it has the checkpoint's name. It appears once it
        is complete. Raises :class:`~vcasgd.errors.Conflict` if there is no model yet,
        :class:`~vcasgd.errors.CheckpointDamaged` if a digest does not match, and
        :class:`~vcasgd.errors.SpecError` if the base is not found.
        """
        parts = ("model",) if checkpoint is None else ("checkpoints", checkpoint)
        source = path_of("jobs", job, *parts)
        if trained_only:
            return self._api.download(source, path)
        folder = path if path.is_dir() else path.parent
        with TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
            file = self._api.download(source, Path(scratch))
            target = path / file.name if path.is_dir() else path
            return finish(file, target, lambda: self.job(job).spec, working_dir)

    def track(
        self,
        job: str,
        to: TrackerKind | str,
        *,
        folder: Path = Path("runs"),
        project: str = PROJECT,
        follow: bool = False,
    ) -> str:
        """Export a job's history to a tracker, and continue where the last export ended.

        With ``follow``, new points follow until the job ends, and with them those of the workers'
        processors, memory, and network. ``folder`` is for the files of
        TensorBoard and W&B, in a folder of the job's name; ``project`` is the project of W&B and
        the experiment of MLflow. Returns the folder or the address of the run. Raises
        :class:`~vcasgd.errors.SpecError` if there is no such tracker or its library is not
        installed, and :class:`~vcasgd.errors.ApiError` if the tracker refuses the run.
        """
        view, points = self.job(job), HISTORY_POINTS
        tracker, ended = open_tracker(tracker_kind(to), view, folder, project), None
        next_system = 0.0
        try:
            while True:
                rows = self.metrics(job, tracker.position.point, points=points)
                new = list(new_points(rows, view.evaluations, tracker.position))
                for first in range(0, len(new), POINTS_AT_ONCE):
                    tracker.log(new[first : first + POINTS_AT_ONCE])
                ended = view if view.over else None
                if ended or not follow:
                    return tracker.place
                if time.monotonic() >= next_system:
                    next_system = time.monotonic() + SYSTEM_SECONDS
                    if used := worker_points(self.workers(job), view, tracker.position):
                        tracker.log(used)
                time.sleep(REFRESH_SECONDS)
                view = self.job(job)
        finally:
            tracker.close(ended)

    def _command(self, job: str, command: str, body: dict[str, Any] | None = None) -> Job:
        return self._bound(self._api.post(Job, path_of("jobs", job, command), body))

    def _bound(self, job: Job) -> Job:
        job._calls = self
        return job


class Job(JobView):
    """Immutable snapshot of a job, with methods to query and control it.

    :meth:`refreshed`, :meth:`wait`, and the commands return a new snapshot. Methods raise the
    same errors as those of :class:`~vcasgd.Client`.
    """

    _calls: JobCalls = PrivateAttr()

    def refreshed(self) -> Job:
        """Return the current state of the job."""
        return self._calls.job(self.id)

    def wait(self, timeout: float | None = None, patience: float = PATIENCE_SECONDS) -> Job:
        """Return the job once it has ended, after at most ``timeout`` seconds.

        Raises :class:`~vcasgd.errors.ApiError` if it has not ended in time.
        """
        return self._calls.wait(self.id, timeout, patience)

    # -- commands -----------------------------------------------------------------------------

    def pause(self) -> Job:
        """Pause the job. Raises :class:`~vcasgd.errors.Conflict` if it is not running."""
        return self._calls.pause(self.id)

    def resume(self, max_cost_usd: float | None = None) -> Job:
        """Resume the job, optionally with a new budget for the whole job.

        Raises :class:`~vcasgd.errors.Conflict` if it is not paused.
        """
        return self._calls.resume(self.id, max_cost_usd)

    def change(self, **fields: Any) -> Job:
        """Change the ``priority`` or the ``weight`` of the job.

        Raises :class:`~vcasgd.errors.Conflict` if it has ended.
        """
        return self._calls.change(self.id, **fields)

    def cancel(self) -> Job:
        """Cancel the job. Raises :class:`~vcasgd.errors.Conflict` if it has ended."""
        return self._calls.cancel(self.id)

    def delete(self) -> None:
        """Delete the job, with its history, checkpoints, and model.

        Raises :class:`~vcasgd.errors.Conflict` if it has not ended.
        """
        self._calls.delete(self.id)

    # -- history ------------------------------------------------------------------------------

    def metrics(self, points: int | None = None, names: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Return the metrics over time as a table, for ``pandas.DataFrame(job.metrics())``.

        Each point is a row, oldest first, and all rows have the same columns. ``at`` is in Unix
        seconds. Each metric of the task's ``evaluate`` has its own column,
        ``validation.<name>``. ``points`` thins the history to at most this many points, and
        keeps spikes. ``names`` selects columns beside ``at``.
        """
        return table_of(self._calls.metrics(self.id, points=points, names=names))

    def events(self, after: str | None = None, follow: bool = False) -> Iterator[EventRow]:
        """Yield the job's events, oldest first; with ``follow`` until it ends."""
        return self._calls.events(self.id, after, follow)

    def logs(self, after: str | None = None, follow: bool = False) -> Iterator[LogRow]:
        """Yield the lines that its workers printed, like :meth:`events`."""
        return self._calls.logs(self.id, after, follow)

    def machines(self) -> list[MachineView]:
        """Return the job's machines, with their states over time."""
        return self._calls.machines(self.id)

    def workers(self) -> list[WorkerRow]:
        """Return the last heartbeats of the job's workers."""
        return self._calls.workers(self.id)

    def cost(self) -> CostView:
        """Return the cost of the job's machines so far."""
        return self._calls.cost(self.id)

    def checkpoints(self) -> list[CheckpointRow]:
        """Return the job's checkpoints, oldest first."""
        return self._calls.checkpoints(self.id)

    def download(
        self,
        path: Path,
        checkpoint: str | None = None,
        *,
        trained_only: bool = False,
        working_dir: Path | None = None,
    ) -> Path:
        """Download the finished model, or a checkpoint, and return its path.

        See :meth:`vcasgd.Client.download`.
        """
        return self._calls.download(
            self.id, path, checkpoint, trained_only=trained_only, working_dir=working_dir
        )

    def track(
        self,
        to: TrackerKind | str,
        *,
        folder: Path = Path("runs"),
        project: str = PROJECT,
        follow: bool = False,
    ) -> str:
        """Export the job's history to a tracker. See :meth:`vcasgd.Client.track`."""
        return self._calls.track(self.id, to, folder=folder, project=project, follow=follow)


def table_of(rows: Sequence[MetricRow]) -> list[dict[str, Any]]:
    """Return points of the metrics as rows without IDs, with a column for each metric of the
    validation."""
    columns = {f"validation.{name}": None for row in rows for name in row.validation or ()}
    return [
        {
            **row.model_dump(exclude_unset=True, exclude={"id", "validation"}),
            **columns,
            **{f"validation.{name}": value for name, value in (row.validation or {}).items()},
        }
        for row in rows
    ]
