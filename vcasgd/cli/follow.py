"""A job's progress on a terminal: its events, and a line with its figures."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

from rich.console import Console
from rich.text import Text

from vcasgd.client import PATIENCE_SECONDS, Client, Job, may_work_later
from vcasgd.errors import ApiError
from vcasgd.schemas.fleet import WorkerRow
from vcasgd.schemas.history import EventRow, LogRow
from vcasgd.schemas.jobs import JobView
from vcasgd.spec.sections import metric_text

#: Seconds between two readings of a job.
READ_SECONDS = 1.0
#: Readings over which updates per second are averaged.
RATE_READINGS = 5
#: Seconds without a heartbeat after which a worker no longer counts.
SILENT_SECONDS = 5.0
#: Seconds between two lines of figures if the output is not a terminal.
LINE_SECONDS = 5.0
#: Metrics of the newest evaluation on the line.
MAX_METRICS = 3
#: Kinds of events that the figures already show; ``vcasgd events`` prints all kinds.
ROUTINE = ("evaluated", "checkpoint")


@dataclass(frozen=True)
class JobStatus:
    """A job at one moment."""

    job: Job
    workers: list[WorkerRow]
    #: Events since the previous status.
    events: list[EventRow]
    updates_per_second: float | None = None
    #: Why this status shows nothing new.
    error: str | None = None

    def __str__(self) -> str:
        """Return the figures of a status on one line."""
        job, rate = self.job, self.updates_per_second
        return "  ".join(
            (
                f"{job.seconds:.0f} s",
                _state(self),
                f"epoch {job.epoch}/{job.progress.epochs_text} ({job.progress.fraction:.0%})",
                f"train loss {'-' if job.loss is None else f'{job.loss:.4g}'}",
                *(metric_text(*metric) for metric in first_metrics(job)),
                f"{'-' if rate is None else f'{rate:.1f}'} updates/s",
                f"staleness {job.totals.staleness_mean:.1f}",
                f"workers {len(self.workers)}",
                f"evictions {job.evictions}",
                f"kills {job.kills}",
            )
        )


def _state(status: JobStatus) -> str:
    """Return the state: of a starting job with what it does, or why it waits."""
    job, text = status.job, status.job.status or status.job.state
    busy = (row.doing for row in status.workers if row.doing and "starting" not in row.doing)
    doing = next(busy, None if status.workers else job.waiting)
    return f"{text}: {doing}" if text in ("queued", "starting") and doing else text


def first_metrics(job: JobView) -> list[tuple[str, float | None]]:
    """Return the newest metrics that fit on a line, the one that ranks the models first."""
    return list(job.newest_metrics.items())[:MAX_METRICS]


def statuses(client: Client, name: str) -> Iterator[JobStatus]:
    """Yield the status of a job every second until the job has ended.

    Raises :class:`~vcasgd.errors.ApiError` after two minutes without an answer, and
    :class:`~vcasgd.errors.NotFound` if the job does not exist.
    """
    status, last_event = _read(client.job(name), None), None
    answered = time.monotonic()
    counts: deque[tuple[float, int]] = deque(maxlen=RATE_READINGS + 1)
    while True:
        yield status
        if status.job.over:
            return
        last_event = status.events[-1].id if status.events else last_event
        time.sleep(READ_SECONDS)
        try:
            status = _read(status.job.refreshed(), last_event)
        except ApiError as error:
            if not may_work_later(error) or time.monotonic() > answered + PATIENCE_SECONDS:
                raise
            status = replace(status, events=[], updates_per_second=None, error=error.message)
            continue
        answered = time.monotonic()
        counts.append((answered, status.job.totals.updates))
        (since, before), (until, after) = counts[0], counts[-1]
        if until > since:
            status = replace(status, updates_per_second=(after - before) / (until - since))


def _read(job: Job, last_event: str | None) -> JobStatus:
    # Events are read after the job: the last status then contains all of them.
    events = list(job.events(last_event))
    return JobStatus(job, [] if job.over else _alive(job.workers()), events)


def _alive(rows: list[WorkerRow]) -> list[WorkerRow]:
    """Return the workers without silent ones; a heartbeat outlives its worker for a while.

    The newest heartbeat represents the present, because clocks of machines differ.
    """
    newest = max((row.at or 0.0 for row in rows), default=0.0)
    return [row for row in rows if (row.at or 0.0) > newest - SILENT_SECONDS]


def follow(
    statuses: Iterable[JobStatus],
    console: Console,
    hook: Callable[[JobStatus], None] = lambda _status: None,
) -> JobView:
    """Show a job until it ends, and return its last state. ``hook`` is called with each status.

    A terminal has one line of figures below the events. Other outputs get one from time to time,
    and after each epoch, evaluation, and change of state.
    """
    live = console.status("") if console.is_terminal else None
    shown: tuple[object, ...] = ()
    shown_at = time.monotonic()
    with live or nullcontext():
        for status in statuses:
            hook(status)
            for event in status.events:
                if event.kind not in ROUTINE:
                    console.print(event_line(event))
            job, now = status.job, time.monotonic()
            text = f"{status.error}; retrying" if status.error else str(status)
            landmarks = (
                _state(status),
                job.progress.finished_epochs,
                len(job.evaluations),
                status.error,
            )
            if live:
                # A plain string would be parsed as markup.
                live.update(Text(text))
            elif landmarks != shown or now > shown_at + LINE_SECONDS:
                shown, shown_at = landmarks, now
                console.print(text)
    return job


#: Words for the levels of log lines; output has none.
_LEVELS = {"out": "", "err": "stderr"}


def log_line(line: LogRow) -> str:
    """Return a line of a job's log for people: time, machine, level, and text."""
    at = time.strftime("%H:%M:%S", time.localtime(line.at))
    machine = line.worker.rpartition(".")[2]
    level = _LEVELS.get(line.level, line.level)
    return f"{at}  {machine}  {level:7}  {line.line}"


def event_line(event: EventRow) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(event.at))}  {event.kind}: {event.text}"
