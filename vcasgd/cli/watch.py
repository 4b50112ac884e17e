"""Statuses of a job while it runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

from vcasgd.client import PATIENCE_SECONDS, Client, may_work_later
from vcasgd.errors import ApiError
from vcasgd.schemas.fleet import WorkerRow
from vcasgd.schemas.history import EventRow
from vcasgd.schemas.jobs import JobView
from vcasgd.schemas.stream import JobBrief, JobEventRow, StreamMessage

#: Seconds without a change after which the status is read again, to update its time.
QUIET_SECONDS = 5.0
#: Seconds between two attempts to open the stream.
RETRY_SECONDS = 0.5
#: Seconds over which updates per second are averaged, and the least for an average.
RATE_SECONDS = 5.0
MIN_RATE_SECONDS = 0.25
#: Seconds without a heartbeat after which a worker is no longer shown.
SILENT_SECONDS = 5.0


@dataclass(frozen=True)
class JobStatus:
    """A job at one moment."""

    job: JobView
    workers: list[WorkerRow]
    #: Events since the previous status.
    events: list[EventRow]
    updates_per_second: float | None
    #: Age of the job, until its end.
    seconds: float
    #: Why this status shows nothing new.
    trouble: str | None = None


class Watch:
    """Follower of a job: reads its status whenever the event stream reports a change.

    Outages of the API are tolerated for a while.
    """

    def __init__(self, client: Client, job: str, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._job = job
        self._clock = clock
        self._last_event: str | None = None
        self._counts: deque[tuple[float, int]] = deque()
        self._stream: Iterator[StreamMessage] = iter(())

    def statuses(self, patience: float = PATIENCE_SECONDS) -> Iterator[JobStatus]:
        """Yield a status after each change, and from time to time, until the job has ended.

        Raises :class:`~vcasgd.errors.ApiError` after ``patience`` seconds without an answer,
        and :class:`~vcasgd.errors.NotFound` if the job does not exist.
        """
        status = self.read()
        answered = self._clock()
        try:
            while True:
                yield status
                if status.job.over:
                    return
                try:
                    status = self._next(status)
                    answered = self._clock()
                except ApiError as error:
                    if not may_work_later(error) or self._clock() > answered + patience:
                        raise
                    status = replace(
                        status, events=[], updates_per_second=None, trouble=error.message
                    )
        finally:
            if isinstance(self._stream, Generator):
                self._stream.close()

    def read(self) -> JobStatus:
        """Read and return the current status."""
        job = self._client.job(self._job)
        # read events after the job: the last status then contains all of them
        events = list(self._client.events(self._job, self._last_event))
        if events:
            self._last_event = events[-1].id
        return JobStatus(
            job=job,
            workers=[] if job.over else _alive(self._client.workers(self._job)),
            events=events,
            updates_per_second=self._rate(job),
            seconds=self._age(job),
        )

    def _next(self, status: JobStatus) -> JobStatus:
        """Return the next status: after a change, or after some seconds without one."""
        deadline = self._clock() + QUIET_SECONDS
        try:
            for entry in self._stream:
                data = entry.data
                if isinstance(data, JobEventRow) and data.job == self._job and self._is_new(data):
                    return self._after_event(status, data)
                is_change = isinstance(data, JobBrief) and data.id == self._job
                if is_change or self._clock() > deadline:
                    return self.read()
        except ApiError:
            # the stream was silent or broke; the requests below show whether the API answers
            pass
        time.sleep(RETRY_SECONDS)
        self._stream = self._client.changes(patience=0.0, silence=QUIET_SECONDS)
        return self.read()

    def _after_event(self, status: JobStatus, event: EventRow) -> JobStatus:
        if event.kind.startswith("job-"):
            return self.read()
        self._last_event = event.id
        return replace(status, events=[event], seconds=self._age(status.job), trouble=None)

    def _is_new(self, event: EventRow) -> bool:
        return self._last_event is None or _order(event.id) > _order(self._last_event)

    def _age(self, job: JobView) -> float:
        return (job.ended_at or self._clock()) - job.created_at

    def _rate(self, job: JobView) -> float | None:
        now = self._clock()
        self._counts.append((now, job.totals.updates))
        while len(self._counts) > 2 and self._counts[1][0] < now - RATE_SECONDS:
            self._counts.popleft()
        (since, before), (until, after) = self._counts[0], self._counts[-1]
        return (after - before) / (until - since) if until - since > MIN_RATE_SECONDS else None


def _order(event_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in event_id.split("-"))


def _alive(rows: list[WorkerRow]) -> list[WorkerRow]:
    """Return the workers without silent ones; a heartbeat outlives its worker for a while.

    The newest heartbeat represents the present, because clocks of machines differ.
    """
    newest = max((row.at or 0.0 for row in rows), default=0.0)
    return [row for row in rows if (row.at or 0.0) > newest - SILENT_SECONDS]


def accuracy(job: JobView) -> float | None:
    """Return the accuracy in the newest evaluation."""
    return job.evaluations[-1].metrics.get("accuracy") if job.evaluations else None


def epoch(job: JobView) -> int:
    """Return the number of the current epoch, from 1."""
    current = job.progress.finished_epochs + 1
    return current if job.progress.epochs is None else min(current, job.progress.epochs)
