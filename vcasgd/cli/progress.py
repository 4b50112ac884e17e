"""Live view of a job for terminals, and plain lines for other outputs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vcasgd.cli.output import duration, percent
from vcasgd.cli.watch import JobStatus, accuracy, epoch
from vcasgd.schemas.fleet import WorkerRow
from vcasgd.schemas.history import EventRow
from vcasgd.schemas.jobs import JobView

#: Newest events in the live view.
EVENTS_SHOWN = 8
#: Kinds of events that the figures already show; ``vcasgd events`` prints all kinds.
ROUTINE = ("evaluated", "checkpoint")
#: Events for lost machines, the worst first, with the mark below the workers and its style.
LOSSES = {
    "worker-killed": ("▲", "red"),
    "worker-crashed": ("▲", "red"),
    "worker-evicted": ("▲", "yellow"),
    "eviction-notice": ("△", "yellow"),
}
#: Newest losses in the live view; they have their own lines so that other events don't push
#: them out.
LOSSES_SHOWN = 4
#: Seconds between two summary lines of the plain view between evaluations.
LINE_SECONDS = 5.0
#: Fraction of the job that must be done before an estimate of the remaining time is useful.
SOONEST_FRACTION = 0.02

_BARS = "▁▂▃▄▅▆▇█"
#: Values in a sparkline; leaves room for a label on a narrow terminal.
MAX_BARS = 40

#: Called with each status before it is shown.
Hook = Callable[[JobStatus], None]


class View(Protocol):
    """Display for the states of a job."""

    def show(self, status: JobStatus) -> None: ...


def follow(
    statuses: Iterable[JobStatus], console: Console, hook: Hook = lambda _status: None
) -> JobView:
    """Show a job until it ends, and return its last state."""
    live = LiveView(console) if console.is_terminal else None
    view: View = live or PlainView(console)
    with live or nullcontext():
        for status in statuses:
            hook(status)
            view.show(status)
    return status.job


class PlainView:
    """View that prints one line for each event, and a summary line from time to time."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._summarized_at = clock()
        self._landmarks: tuple[object, ...] = ()

    def show(self, status: JobStatus) -> None:
        for event in _remarkable(status):
            self._print(event_line(event))
        landmarks = (status.job.state, _measured(status.job), status.trouble)
        if landmarks != self._landmarks or self._clock() > self._summarized_at + LINE_SECONDS:
            self._landmarks, self._summarized_at = landmarks, self._clock()
            self._print(status.trouble or summary_line(status))

    def _print(self, text: str) -> None:
        self._console.print(text)


class LiveView:
    """View that redraws one picture in a terminal; the last picture stays on the screen."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._events: deque[EventRow] = deque(maxlen=EVENTS_SHOWN)
        self._losses: deque[EventRow] = deque(maxlen=LOSSES_SHOWN)
        self._workers: deque[int] = deque(maxlen=MAX_BARS)
        self._marks: deque[Text] = deque(maxlen=MAX_BARS)

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._live.stop()

    def show(self, status: JobStatus) -> None:
        # The first status carries all earlier events; they have no place below the bars.
        self._marks.append(mark(status.events if self._workers else ()))
        self._workers.append(len(status.workers))
        for event in _remarkable(status):
            (self._losses if event.kind in LOSSES else self._events).append(event)
        self._live.update(self._picture(status), refresh=True)

    def _picture(self, status: JobStatus) -> RenderableType:
        parts: list[RenderableType] = [_title(status), _bar(status), _numbers(status)]
        parts.append(_lines(status.job, self._workers, self._marks))
        if status.workers:
            parts += [Text(), _workers(status.workers)]
        if self._losses:
            parts += [Text(), *map(_loss_line, self._losses)]
        if self._events:
            parts += [Text(), *(Text(event_line(event), style="dim") for event in self._events)]
        if status.trouble:
            parts += [Text(), Text(f"{status.trouble}; retrying", style="yellow")]
        return Group(*parts)


def _measured(job: JobView) -> int:
    """Return what a summary line is printed for: finished epochs, or evaluations."""
    by_epochs = job.spec.evaluate.interval.unit == "epoch"
    return job.progress.finished_epochs if by_epochs else len(job.evaluations)


def event_line(event: EventRow) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(event.at))}  {event.kind}: {event.text}"


def mark(events: Iterable[EventRow]) -> Text:
    """Return the mark of the worst loss among the events, or a space if there is none."""
    kinds = {event.kind for event in events}
    letter, style = next((sign for kind, sign in LOSSES.items() if kind in kinds), (" ", ""))
    return Text(letter, style=style)


def sparkline(values: Iterable[float], lowest: float | None = None) -> str:
    """Return a line of bars for the newest values.

    The scale reaches from ``lowest`` (by default, the smallest value shown) to the largest
    value shown.
    """
    shown = list(values)[-MAX_BARS:]
    if not shown:
        return ""
    low, high = min(shown) if lowest is None else lowest, max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)


def _loss_line(event: EventRow) -> Text:
    letter, style = LOSSES[event.kind]
    return Text(f"{letter} {event_line(event)}", style=style)


def _remarkable(status: JobStatus) -> list[EventRow]:
    return [event for event in status.events if event.kind not in ROUTINE]


def summary_line(status: JobStatus) -> str:
    """Return the figures of a status on one line."""
    job = status.job
    parts = [
        f"{status.seconds:.0f} s",
        job.state,
        f"epoch {epoch(job)}/{job.progress.epochs_text} ({job.progress.fraction:.0%})",
        f"accuracy {percent(accuracy(job)) or '-'}",
        f"{_rate(status)} updates/s",
        f"staleness {job.totals.staleness_mean:.1f}",
        f"workers {len(status.workers)}",
        f"evictions {job.evictions}",
        f"kills {job.kills}",
    ]
    return "  ".join(parts)


def _title(status: JobStatus) -> RenderableType:
    colors = {"succeeded": "green", "failed": "red", "cancelled": "yellow", "paused": "yellow"}
    text = Text.assemble(
        (status.job.id, "bold"),
        "  ",
        (status.job.state, colors.get(status.job.state, "cyan")),
        "  ",
    )
    return text.append(duration(status.seconds), "dim")


def _bar(status: JobStatus) -> RenderableType:
    job = status.job
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=1.0, completed=job.progress.fraction, width=50)
    label = f"epoch {epoch(job)}/{job.progress.epochs_text}"
    left = time_left(status)
    grid.add_row(
        label, bar, f"{job.progress.fraction:.0%}", f"{duration(left)} left" if left else ""
    )
    return grid


def time_left(status: JobStatus) -> float | None:
    """Return the remaining seconds at the average speed so far, or None if it is unknown."""
    job, now = status.job, status.job.created_at + status.seconds
    started_at, fraction = job.started_at, job.progress.fraction
    if started_at is None or job.state != "running" or fraction < SOONEST_FRACTION:
        return None
    return (now - started_at) * (1 - fraction) / fraction


def _lines(job: JobView, workers: Iterable[int], marks: Iterable[Text]) -> RenderableType:
    """Return sparklines of accuracies and of workers per status, with marks for losses."""
    accuracies = [each.metrics.get("accuracy") for each in job.evaluations]
    grid = Table.grid(padding=(0, 1))
    grid.add_row("accuracy", Text(sparkline(x for x in accuracies if x is not None), style="green"))
    grid.add_row("workers", Text(sparkline(workers, lowest=0), style="cyan"))
    grid.add_row("", Text.assemble(*marks))
    return grid


def _numbers(status: JobStatus) -> RenderableType:
    job = status.job
    grid = Table.grid(padding=(0, 3))
    grid.add_row(
        f"accuracy {percent(accuracy(job)) or '-'}, best {job.best or '-'}",
        f"{_rate(status)} updates/s",
        f"staleness {job.totals.staleness_mean:.1f} (max {job.totals.staleness_max})",
    )
    grid.add_row(
        f"workers {len(status.workers)}",
        f"evictions {job.evictions}, kills {job.kills}",
        f"rejected {sum(job.totals.rejected.values())}",
    )
    return grid


def _workers(rows: list[WorkerRow]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for row in rows:
        activity = row.quarantined or row.leaving or row.doing
        notice = "eviction notice" if row.notice else ""
        grid.add_row(row.instance or row.name, activity, Text(notice, style="yellow"))
    return grid


def _rate(status: JobStatus) -> str:
    rate = status.updates_per_second
    return "-" if rate is None else f"{rate:.1f}"
