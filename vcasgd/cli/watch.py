"""A job as it goes: what is known at each look."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vcasgd.client import PATIENCE_SECONDS, Client, Event, JobView, Row
from vcasgd.client.problems import may_work_later
from vcasgd.errors import ApiError

#: between two looks
LOOK_SECONDS = 0.5
#: updates per second are an average over this time
RATE_SECONDS = 5.0
#: a worker that was not heard of for so long is not shown
SILENT_SECONDS = 5.0


@dataclass(frozen=True)
class JobStatus:
    """A job at one moment. ``events`` are those since the look before."""

    job: JobView
    workers: list[Row]
    events: list[Event]
    updates_per_second: float | None
    seconds: float
    #: why this look shows nothing new
    trouble: str | None = None


class Watch:
    """Looks at a job again and again; outages of the API are borne for a while."""

    def __init__(self, client: Client, job: str, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._job = job
        self._clock = clock
        self._last_event: str | None = None
        self._counts: deque[tuple[float, int]] = deque()

    def looks(self, patience: float = PATIENCE_SECONDS) -> Iterator[JobStatus]:
        """Until the job is over; the last look shows it so.

        Raises :class:`~vcasgd.errors.ApiError` after ``patience`` seconds without an answer,
        and :class:`~vcasgd.errors.NotFound` where there is no such job.
        """
        look = self.look()
        answered = self._clock()
        while True:
            yield look
            if look.job.over:
                return
            time.sleep(LOOK_SECONDS)
            try:
                look = self.look()
                answered = self._clock()
            except ApiError as error:
                if not may_work_later(error) or self._clock() > answered + patience:
                    raise
                look = _in_trouble(look, error)

    def look(self) -> JobStatus:
        job = self._client.job(self._job)
        # after the job, so that the last look has all its events
        events = list(self._client.events(self._job, self._last_event))
        if events:
            self._last_event = events[-1].id
        return JobStatus(
            job=job,
            workers=[] if job.over else _living(self._client.workers(self._job)),
            events=events,
            updates_per_second=self._rate(job),
            seconds=(job.ended_at or self._clock()) - job.created_at,
        )

    def _rate(self, job: JobView) -> float | None:
        now = self._clock()
        self._counts.append((now, job.totals.updates))
        while len(self._counts) > 2 and self._counts[1][0] < now - RATE_SECONDS:
            self._counts.popleft()
        (since, before), (until, after) = self._counts[0], self._counts[-1]
        return (after - before) / (until - since) if until - since > LOOK_SECONDS / 2 else None


def _living(rows: list[Row]) -> list[Row]:
    """Without those that fell silent: a heartbeat outlives its worker for a while.

    The newest heartbeat stands for the present, whatever our own clock says.
    """
    newest = max((row.get("at") or 0.0 for row in rows), default=0.0)
    return [row for row in rows if (row.get("at") or 0.0) > newest - SILENT_SECONDS]


def _in_trouble(look: JobStatus, error: ApiError) -> JobStatus:
    return JobStatus(look.job, look.workers, [], None, look.seconds, trouble=error.message)


def accuracy(job: JobView) -> float | None:
    """Of the newest evaluation."""
    return job.evaluations[-1].metrics.get("accuracy") if job.evaluations else None


def epoch(job: JobView) -> int:
    """The one at work, from 1."""
    return min(job.progress.finished_epochs + 1, job.progress.epochs)
