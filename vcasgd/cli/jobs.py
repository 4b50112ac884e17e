"""Commands for jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from vcasgd.cli.follow import event_line, log_line, statuses
from vcasgd.cli.follow import follow as show_progress
from vcasgd.cli.jobfile import load_job, show_warnings
from vcasgd.cli.money import Changes, FinishBy, Within, checked, confirm, deadline_changes
from vcasgd.cli.output import (
    INTERRUPTED,
    Columns,
    JobName,
    Json,
    Token,
    Url,
    ago,
    duration,
    err,
    open_client,
    out,
    show_facts,
    show_json,
    show_rows,
    show_traceback,
    size,
    until,
)
from vcasgd.client import Client
from vcasgd.client.client import packed
from vcasgd.client.secrets import read_secrets
from vcasgd.schemas.history import EventRow, LogRow
from vcasgd.schemas.jobs import JobView, TunedView
from vcasgd.settings import load_settings
from vcasgd.spec.job import JobSpec, JobState
from vcasgd.spec.problems import did_you_mean
from vcasgd.spec.sections import TrackerKind, metric_text
from vcasgd.spec.values import parse_duration
from vcasgd.task.package import packed_files

#: States whose reason people need.
PROBLEM_STATES = (JobState.FAILED, JobState.PAUSED)
_JOBS: Columns = {
    "JOB": lambda row: row["id"],
    "STATE": lambda row: row["status"] or row["state"],
    "EPOCH": lambda row: f"{row['progress']['finished_epochs']}/{row['progress']['epochs'] or '?'}",
    "BEST": lambda row: best_text(row["best"]),
    "UPDATES": lambda row: row["totals"]["updates"],
    "PRIORITY": lambda row: priority_text(row["spec"]["priority"], row["spec"]["weight"]),
    "LOST": lambda row: row["evictions"] + row["kills"],
    "OWNER": lambda row: row["owner"],
    "SUBMITTED": lambda row: ago(row["created_at"]),
    "DEADLINE": lambda row: _due(row),
    "WAITING": lambda row: row.get("waiting"),
    "REASON": lambda row: row["reason"] if row["state"] in PROBLEM_STATES else None,
}
#: Names that jobs are filtered by.
STATES = (*JobState, "active", "queued")
Row = TypeVar("Row", EventRow, LogRow)
Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Stream new entries until the job ends.")
]


def _due(row: Mapping[str, Any]) -> str | None:
    at = row.get("deadline")
    if at is None or row["ended_at"] is not None:
        return None
    return until(at) if at > time.time() else "missed"


def state_name(text: str) -> str:
    """Check a state of the command line."""
    if text in STATES:
        return text
    hint = did_you_mean(text, STATES) or f"there are {', '.join(STATES)}"
    raise typer.BadParameter(f"there is no state {text}; {hint}")


def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="Job file, or its folder.")],
    following: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the job until it ends.")
    ] = False,
    within: Within = None,
    finish_by: FinishBy = None,
    changes: Changes = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Key for safe retries: one job per key.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the job here, also without a stack; submit nothing."),
    ] = False,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Submit a job. With --follow, exit with status 0 only if the job succeeds.

    If the job costs money, the command shows the plan and asks for confirmation first.
    """
    spec = load_job(file, [*(changes or ()), *deadline_changes(within, finish_by)])
    show_warnings(spec)
    package = packed(spec, load_settings().package_limit_mb)
    read_secrets(spec)
    if dry_run:
        if as_json:
            show_json(spec)
        else:
            _show_packed(spec, f"{file} is a valid job; nothing was submitted")
        return
    with open_client(url, token) as client:
        if not yes:
            confirm(client, spec)
        job = client.submit(spec, package, idempotency_key)
        if as_json:
            show_json(job)
        else:
            _show_packed(spec, f"submitted {job.id}")
        if following:
            # Standard output has the job's JSON only.
            follow_job(client, job.id, err if as_json else out)
        elif not as_json:
            out.print(f"follow it with: vcasgd follow {job.id}")


def _show_packed(spec: JobSpec, text: str) -> None:
    sizes = [path.stat().st_size for path in packed_files(Path(spec.working_dir))]
    out.print(text)
    out.print(f"packed {len(sizes)} files ({size(sum(sizes))}) of {spec.working_dir}")


def follow(job: JobName, url: Url = None, token: Token = None) -> None:
    """Show a job's progress until it ends. Ctrl-C stops following; the job keeps running.

    Exit status: 0 if the job succeeded, 1 if it did not, 130 after Ctrl-C.
    """
    with open_client(url, token) as client:
        follow_job(client, job)


def jobs(
    state: Annotated[
        str | None,
        typer.Option(
            metavar="STATE",
            parser=state_name,
            help="Filter by state; active: not ended; queued: without a machine.",
        ),
    ] = None,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """List jobs, newest first."""
    with open_client(url, token) as client:
        show_rows(client.jobs(state), _JOBS, as_json=as_json)


def show(job: JobName, as_json: Json = False, url: Url = None, token: Token = None) -> None:
    """Show the details of a job."""
    with open_client(url, token) as client:
        view = client.job(job)
    if as_json:
        show_json(view)
        return
    show_facts(_facts(view), width=12)
    show_traceback(view.traceback or "")


def events(
    job: JobName, following: Follow = False, as_json: Json = False,
    url: Url = None, token: Token = None,
) -> None:  # fmt: skip
    """Print the events of a job. With --json --follow, print one object per line."""
    with open_client(url, token) as client, _interruptible(job):
        stream = client.job(job).events(follow=following)
        _show_stream(stream, event_line, following=following, as_json=as_json)


def logs(
    job: JobName,
    following: Follow = False,
    tail: Annotated[
        int | None, typer.Option(min=1, help="Number of lines to show from the end.")
    ] = None,
    worker: Annotated[
        str | None, typer.Option(help="Show only workers whose name contains this.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            parser=checked(parse_duration),
            help="Show only lines newer than this, such as 10m.",
        ),
    ] = None,
    grep: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Show only lines that contain this, ignoring case."),
    ] = None,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Print what a job's workers print and log. With --json --follow, one object per line."""
    start = time.time() - parse_duration(since).total_seconds() if since else None
    with open_client(url, token) as client, _interruptible(job):
        stream = client.job(job).logs(
            follow=following, tail=tail, worker=worker, since=start, grep=grep
        )
        _show_stream(stream, log_line, following=following, as_json=as_json)


def track(
    job: JobName,
    to: Annotated[TrackerKind, typer.Option(help="Tracker to export to.")],
    folder: Annotated[Path, typer.Option(help="Output folder; each job gets a subfolder.")] = Path(
        "runs"
    ),
    project: Annotated[str, typer.Option(help="W&B project or MLflow experiment.")] = "vcasgd",
    following: Follow = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Export a job's history to TensorBoard, MLflow, W&B, or Trackio.

    The next export of the same job continues where this one ends.
    """
    with open_client(url, token) as client, _interruptible(job):
        place = client.job(job).track(to, folder=folder, project=project, follow=following)
        out.print(place)


def follow_job(client: Client, job: str, console: Console = out) -> None:
    with _interruptible(job):
        view = show_progress(statuses(client, job), console)
    console.print(_conclusion(view))
    if view.state != "succeeded":
        reason = view.reason or "no reason given"
        err.print(f"error: job {view.id} {view.state.phrase}: {reason}")
        show_traceback(view.traceback or "")
        raise typer.Exit(1)


def metrics_text(metrics: Mapping[str, float | None]) -> str:
    return ", ".join(metric_text(name, value) for name, value in metrics.items() if name != "count")


@contextmanager
def _interruptible(job: str) -> Iterator[None]:
    """Exit the command on Ctrl-C, and print how to follow or cancel the job."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(
            f"\njob {job} keeps running; follow it again with: vcasgd follow {job}, "
            f"cancel it with: vcasgd cancel {job}",
        )
        raise typer.Exit(INTERRUPTED) from None


def _conclusion(view: JobView) -> str:
    best = f", best {view.best}" if view.best else ""
    seconds = duration(view.seconds)
    return f"{view.id} {view.state} after {seconds}, {view.totals.updates} updates{best}"


def best_text(best: Mapping[str, Any] | None) -> str | None:
    """Return the best value of a job with the name of its metric."""
    return metric_text(best["metric"], best["value"]) if best else None


def priority_text(priority: str, weight: float) -> str:
    """Return the priority of a job, with its weight unless that is 1."""
    return priority if weight == 1 else f"{priority}, weight {weight:g}"


def _show_stream(
    rows: Iterator[Row], text: Callable[[Row], str], *, following: bool, as_json: bool
) -> None:
    if as_json and not following:
        show_json(list(rows))
        return
    for row in rows:
        show_json(row) if as_json else out.print(text(row))


def _tuned(tuned: TunedView) -> Iterator[str]:
    """Yield each setting that automatic tuning has changed."""
    slower = [share for share in tuned.shares.values() if share < 1]
    if slower:
        yield f"push intervals of slow workers down to {min(slower):.0%}"
    if tuned.implicit_momentum:
        yield f"momentum lowered by {tuned.implicit_momentum:.2f}"
    if tuned.mixing != 1:
        yield f"updates have {tuned.mixing:.0%} of the rule's weight"
    if tuned.rollbacks:
        yield f"learning rate at {tuned.learning_rate:.3g} of yours after divergence"
    more = [count for count in tuned.learners.values() if count > 1]
    if more:
        yield f"up to {max(more)} learners per machine"


def _deadline(view: JobView) -> str | None:
    if view.deadline is None:
        return None
    if view.ended_at is not None:
        early = view.deadline - view.ended_at
        return f"{'met' if early >= 0 else 'missed'} by {duration(abs(early))}"
    left = until(view.deadline) if view.deadline > time.time() else "missed"
    return "; ".join(filter(None, (left, view.outlook)))


def _facts(view: JobView) -> list[tuple[str, object]]:
    progress, totals, traffic = view.progress, view.totals, view.traffic
    moved = f"{size(traffic.pushed_bytes)} pushed, {size(traffic.fetched_bytes)} fetched"
    return [
        ("job", view.id),
        ("state", f"{view.status or view.state}{f': {view.reason}' if view.reason else ''}"),
        ("owner", view.owner),
        ("waiting", view.waiting),
        ("deadline", _deadline(view)),
        *(("note", note) for note in view.notes),
        ("priority", priority_text(view.spec.priority, view.spec.weight)),
        ("submitted", ago(view.created_at)),
        ("took", duration(view.seconds) if view.over else None),
        ("epoch", f"{view.epoch} of {progress.epochs_text} ({progress.fraction:.0%})"),
        ("evaluated", view.evaluations[-1].place if view.evaluations else None),
        ("train loss", None if view.loss is None else f"{view.loss:.4g}"),
        ("metrics", metrics_text(view.newest_metrics)),
        ("best", view.best),
        ("updates", totals.updates),
        ("staleness", f"mean {totals.staleness_mean:.2f}, max {totals.staleness_max}"),
        ("rejected", totals.rejected or None),
        ("traffic", moved),
        ("samples", f"{progress.samples_applied} applied, {progress.samples_repeated} repeated"),
        (
            "skipped",
            f"{progress.samples_skipped} bad samples" if progress.samples_skipped else None,
        ),
        ("machines", f"{view.evictions} evicted, {view.kills} killed"),
        ("store nodes", view.store_nodes),
        ("model", view.model),
        ("request", view.request),
        ("rule", view.spec.update.rule),
        ("tuned", ", ".join(_tuned(view.tuned))),
        ("working dir", view.spec.working_dir),
    ]
