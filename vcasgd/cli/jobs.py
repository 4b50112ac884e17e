"""Commands for jobs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from vcasgd.cli.connection import Token, Url, open_client
from vcasgd.cli.follow import event_line, log_line, statuses
from vcasgd.cli.follow import follow as show_progress
from vcasgd.cli.jobfile import load_job, parse_changes, show_warnings
from vcasgd.cli.money import Changes, confirm
from vcasgd.cli.output import (
    Columns,
    Json,
    ago,
    duration,
    err,
    out,
    show_facts,
    show_json,
    show_rows,
    show_traceback,
    size,
)
from vcasgd.client import Client, Job
from vcasgd.schemas.history import BEST, LAST, CheckpointRow, EventRow, LogRow, chosen
from vcasgd.schemas.jobs import JobView, TunedView
from vcasgd.settings import load_settings
from vcasgd.spec.sections import TrackerKind, metric_text
from vcasgd.spec.values import parse_duration
from vcasgd.task.package import packed_files

#: Exit status after Ctrl-C; a shell reports the same for SIGINT.
INTERRUPTED = 130

_JOBS: Columns = {
    "JOB": lambda row: row["id"],
    "STATE": lambda row: row["state"],
    "EPOCH": lambda row: f"{row['progress']['finished_epochs']}/{row['progress']['epochs'] or '?'}",
    "BEST": lambda row: best_text(row["best"]),
    "UPDATES": lambda row: row["totals"]["updates"],
    "PRIORITY": lambda row: priority_text(row["spec"]["priority"], row["spec"]["weight"]),
    "LOST": lambda row: row["evictions"] + row["kills"],
    "OWNER": lambda row: row["owner"],
    "SUBMITTED": lambda row: ago(row["created_at"]),
    "WAITING": lambda row: row.get("waiting"),
}
_CHECKPOINTS: Columns = {
    "VERSION": lambda row: row["version"],
    "EPOCHS": lambda row: row.get("finished_epochs"),
    "MODEL": lambda row: " ".join(mark for mark in (BEST, LAST) if row[mark]) or None,
    "METRICS": lambda row: _metrics_text(row["metrics"] or {}),
    "MB": lambda row: f"{row['size'] / 1e6:.2f}",
    "WRITTEN": lambda row: ago(row.get("at")),
    "CHECKPOINT": lambda row: row["name"],
}

JobNames = Annotated[list[str] | None, typer.Argument(metavar="JOB…", help="Job IDs.")]
All = Annotated[bool, typer.Option("--all", help="All jobs that the command can change.")]
OnlyState = Annotated[str | None, typer.Option("--state", help="With --all: only in this state.")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Job ID.")]
Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Stream new entries until the job ends.")
]


def _seconds(text: str) -> float:
    """Parse a duration of the command line."""
    try:
        return parse_duration(text).total_seconds()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="Job file.")],
    following: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the job until it ends.")
    ] = False,
    changes: Changes = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Key for safe retries: one job per key.")
    ] = None,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Submit a job. With --follow, exit with status 0 only if the job succeeds.

    If the job costs money, the command shows the plan and asks for confirmation first.
    """
    spec = load_job(file, changes or ())
    show_warnings(spec)
    with open_client(url, token) as client:
        if not yes:
            confirm(client, spec)
        limit_mb = load_settings().package_limit_mb
        job = client.submit_directory(spec, limit_mb, idempotency_key or uuid.uuid4().hex)
        if as_json:
            show_json(job)
        else:
            out.print(f"submitted {job.id}")
            sizes = [path.stat().st_size for path in packed_files(Path(spec.working_dir))]
            out.print(f"packed {len(sizes)} files ({size(sum(sizes))}) of {spec.working_dir}")
        if following:
            _follow(client, job.id)
        elif not as_json:
            out.print(f"follow it with: vcasgd follow {job.id}")


def follow(job: JobName, url: Url = None, token: Token = None) -> None:
    """Show a job's progress until it ends. Ctrl-C stops following; the job keeps running.

    Exit status: 0 if the job succeeded, 1 if it did not, 130 after Ctrl-C.
    """
    with open_client(url, token) as client:
        _follow(client, job)


def jobs(
    state: Annotated[str | None, typer.Option(help="Filter by state; active: not ended.")] = None,
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
        if as_json:
            _show_stream(stream, following)
            return
        for event in stream:
            out.print(event_line(event))


def logs(
    job: JobName,
    following: Follow = False,
    tail: Annotated[int | None, typer.Option(min=1, help="Only the last lines, so many.")] = None,
    worker: Annotated[
        str | None, typer.Option(help="Only of workers with this in their name.")
    ] = None,
    since: Annotated[
        float | None,
        typer.Option(metavar="DURATION", parser=_seconds, help="Only the last 10m, for example."),
    ] = None,
    grep: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only lines with this text, in any case.")
    ] = None,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Print what a job's workers print and log. With --json --follow, one object per line."""
    start = None if since is None else time.time() - since
    with open_client(url, token) as client, _interruptible(job):
        stream = client.job(job).logs(
            follow=following, tail=tail, worker=worker, since=start, grep=grep
        )
        if as_json:
            _show_stream(stream, following)
            return
        for line in stream:
            out.print(log_line(line))


def pause(
    jobs: JobNames = None, every: All = False, state: OnlyState = None,
    url: Url = None, token: Token = None,
) -> None:  # fmt: skip
    """Pause jobs. Their workers stop; their progress is kept."""
    with open_client(url, token) as client:
        for job in _chosen(client, jobs, every, state or ("running" if every else None)):
            _show_state(job.pause())


def resume(
    job: JobName,
    max_cost_usd: Annotated[
        float | None, typer.Option(min=0, help="New total budget in USD.")
    ] = None,
    url: Url = None,
    token: Token = None,
) -> None:
    """Resume a paused job."""
    with open_client(url, token) as client:
        _show_state(client.job(job).resume(max_cost_usd))


def set_(
    job: JobName,
    changes: Annotated[
        list[str], typer.Argument(metavar="FIELD=VALUE…", help="priority=… or weight=…")
    ],
    url: Url = None,
    token: Token = None,
) -> None:
    """Change the priority or the weight of a job that has not ended."""
    fields = parse_changes(changes)
    with open_client(url, token) as client:
        spec = client.job(job).change(**fields).spec
        out.print(f"{job}: priority {priority_text(spec.priority, spec.weight)}")


def cancel(
    jobs: JobNames = None, every: All = False, state: OnlyState = None,
    url: Url = None, token: Token = None,
) -> None:  # fmt: skip
    """Cancel jobs permanently. Their checkpoints are kept."""
    with open_client(url, token) as client:
        for job in _chosen(client, jobs, every, state or ("active" if every else None)):
            _show_state(job.cancel())


def delete(
    jobs: JobNames = None,
    every: All = False,
    state: OnlyState = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Delete jobs that have ended, with their history, checkpoints, and models."""
    with open_client(url, token) as client:
        found = [job for job in _chosen(client, jobs, every, state) if job.over or not every]
        if found and not yes:
            names = ", ".join(job.id for job in found)
            typer.confirm(f"Delete {names} with checkpoints and models?", abort=True, err=True)
        for job in found:
            job.delete()
            out.print(f"{job.id} is deleted", highlight=False)


def _chosen(client: Client, names: list[str] | None, every: bool, state: str | None) -> list[Job]:
    """Return the jobs of these names, or all in a state; all of them exist."""
    if bool(names) == every or (names and state):
        raise typer.BadParameter("name jobs, or use --all, also with --state")
    found = client.jobs(state) if every else [client.job(name) for name in names or ()]
    if not found:
        err.print("no jobs")
    return found


def checkpoints(job: JobName, as_json: Json = False, url: Url = None, token: Token = None) -> None:
    """List the checkpoints of a job."""
    with open_client(url, token) as client:
        show_rows(client.job(job).checkpoints(), _CHECKPOINTS, as_json=as_json)


def download(
    job: JobName,
    to: Annotated[Path, typer.Option(help="Output file or folder.")] = Path(),
    checkpoint: Annotated[str | None, typer.Option(help="Name of a checkpoint.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The best model (default, if a metric ranks models).")
    ] = False,
    last: Annotated[
        bool, typer.Option("--last", help="The last model, also of a job that runs.")
    ] = False,
    trained_only: Annotated[
        bool,
        typer.Option("--trained-only", help="Download only the trained tensors, without the base."),
    ] = False,
    ema: Annotated[
        bool, typer.Option("--ema", help="The moving average of the parameters.")
    ] = False,
    working_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the job's code, which is run to build the base.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    url: Url = None,
    token: Token = None,
) -> None:
    """Download the trained model or a checkpoint: a safetensors file, or a PEFT adapter.

    The error output says which model it is.
    """
    if sum((best, last, checkpoint is not None)) > 1:
        raise typer.BadParameter("choose one of --best, --last, and --checkpoint")
    if ema and trained_only:
        raise typer.BadParameter("choose one of --ema and --trained-only")
    name = BEST if best else LAST if last else checkpoint
    with open_client(url, token) as client:
        found = client.job(job)
        rows = found.checkpoints() if found.model or name else []
        row = chosen(rows, name)
        path = found.download(
            *(to, row.name if row else name),
            trained_only=trained_only,
            ema=ema,
            working_dir=working_dir,
        )
        out.print(str(path))
        if row:
            err.print(_taken(row, rows))


def extend(
    job: JobName,
    epochs: Annotated[
        str, typer.Option(metavar="+N", help="More epochs: +5, or their total number: 25.")
    ],
    following: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the new job until it ends.")
    ] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Train the last model of an ended job for more epochs, as a new job.

    The schedule of the learning rate runs over the new epochs from its start, and the optimizer is
    new.
    """
    with open_client(url, token) as client:
        old = client.job(job)
        more = old.extend(_more_epochs(epochs, old))
        out.print(f"submitted {more.id}: {more.spec.epochs} epochs from the last model of {old.id}")
        if following:
            _follow(client, more.id)


def _more_epochs(text: str, job: JobView) -> int:
    done = 0 if text.startswith("+") else job.progress.finished_epochs
    try:
        more = int(text) - done
    except ValueError:
        more = 0
    if more < 1:
        raise typer.BadParameter(
            f"must be more than the {done} of {job.id}" if done else "must be a number such as +5",
            param_hint="--epochs",
        )
    return more


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
    """Export a job's history to TensorBoard, MLflow, or W&B.

    The next export of the same job continues where this one ends.
    """
    with open_client(url, token) as client, _interruptible(job):
        place = client.job(job).track(to, folder=folder, project=project, follow=following)
        out.print(place)


def _follow(client: Client, job: str) -> None:
    with _interruptible(job):
        view = show_progress(statuses(client, job), out)
    out.print(_conclusion(view))
    if view.state != "succeeded":
        reason = view.reason or "no reason given"
        err.print(f"error: job {view.id} {view.state}: {reason}")
        show_traceback(view.traceback or "")
        raise typer.Exit(1)


def _taken(row: CheckpointRow, rows: Sequence[CheckpointRow]) -> str:
    """Return which model was downloaded, and which other one may be wanted."""
    text = f"this is {_described(row)}"
    last = chosen(rows, LAST)
    if row.best and last and not row.last:
        text += f"; --last takes {_described(last)}"
    return text


def _described(row: CheckpointRow) -> str:
    kind = "the best model" if row.best else "the last model" if row.last else "a checkpoint"
    metrics = f": {_metrics_text(row.metrics)}" if row.metrics else ""
    return f"{kind}, of {row.place or f'version {row.version}'}{metrics}"


def _metrics_text(metrics: Mapping[str, float | None]) -> str:
    return ", ".join(metric_text(*metric) for metric in metrics.items())


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
    seconds = duration((view.ended_at or view.created_at) - view.created_at)
    best = f", best {view.best}" if view.best else ""
    return f"{view.id} {view.state} after {seconds}, {view.totals.updates} updates{best}"


def best_text(best: Mapping[str, Any] | None) -> str | None:
    """Return the best value of a job with the name of its metric."""
    return metric_text(best["metric"], best["value"]) if best else None


def priority_text(priority: str, weight: float) -> str:
    """Return the priority of a job, with its weight unless that is 1."""
    return priority if weight == 1 else f"{priority}, weight {weight:g}"


def _show_state(view: JobView) -> None:
    out.print(f"{view.id} is {view.state}")


def _show_stream(rows: Iterator[EventRow] | Iterator[LogRow], following: bool) -> None:
    if not following:
        show_json(list(rows))
        return
    for row in rows:
        show_json(row)


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


def _facts(view: JobView) -> list[tuple[str, object]]:
    progress, totals, traffic = view.progress, view.totals, view.traffic
    moved = f"{size(traffic.pushed_bytes)} pushed, {size(traffic.fetched_bytes)} fetched"
    return [
        ("job", view.id),
        ("state", f"{view.state}{f': {view.reason}' if view.reason else ''}"),
        ("owner", view.owner),
        ("waiting", view.waiting),
        *(("note", note) for note in view.notes),
        ("priority", priority_text(view.spec.priority, view.spec.weight)),
        ("submitted", ago(view.created_at)),
        ("took", duration(view.ended_at - view.created_at) if view.ended_at else None),
        ("epoch", f"{view.epoch} of {progress.epochs_text} ({progress.fraction:.0%})"),
        ("evaluated", view.evaluations[-1].place if view.evaluations else None),
        ("train loss", None if view.loss is None else f"{view.loss:.4g}"),
        ("metrics", _metrics_text(view.newest_metrics)),
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
