"""Commands for the models of jobs: their checkpoints, downloads, and further training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from vcasgd.cli.jobs import follow_job, metrics_text
from vcasgd.cli.money import confirm
from vcasgd.cli.output import (
    Columns,
    JobName,
    Json,
    Token,
    Url,
    ago,
    err,
    open_client,
    out,
    show_rows,
    size,
)
from vcasgd.schemas.history import BEST, LAST, CheckpointRow, chosen
from vcasgd.schemas.jobs import JobView

_CHECKPOINTS: Columns = {
    "VERSION": lambda row: row["version"],
    "EPOCHS": lambda row: row.get("finished_epochs"),
    "MODEL": lambda row: " ".join(mark for mark in (BEST, LAST) if row[mark]) or None,
    "METRICS": lambda row: metrics_text(row["metrics"] or {}),
    "SIZE": lambda row: size(row["size"]),
    "WRITTEN": lambda row: ago(row.get("at")),
    "CHECKPOINT": lambda row: row["name"],
}


def checkpoints(job: JobName, as_json: Json = False, url: Url = None, token: Token = None) -> None:
    """List the checkpoints of a job."""
    with open_client(url, token) as client:
        show_rows(client.job(job).checkpoints(), _CHECKPOINTS, as_json=as_json)


def download(
    job: JobName,
    to: Annotated[Path, typer.Option(help="Output file or folder.")] = Path(),
    checkpoint: Annotated[str | None, typer.Option(help="Version or name of a checkpoint.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The best model (default, if a metric ranks models).")
    ] = False,
    last: Annotated[
        bool, typer.Option("--last", help="The last model, even while the job runs.")
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

    Prints to stderr which model it downloaded.
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
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Train the last model of an ended job for more epochs, as a new job.

    The schedule of the learning rate runs over the new epochs from its start, and the optimizer is
    new.
    """
    with open_client(url, token) as client:
        old = client.job(job)
        wanted = _more_epochs(epochs, old)
        if not yes:
            confirm(client, old.extended(wanted))
        more = old.extend(wanted)
        out.print(f"submitted {more.id}: {more.spec.epochs} epochs from the last model of {old.id}")
        if following:
            follow_job(client, more.id)


def _more_epochs(text: str, job: JobView) -> int:
    done = 0 if text.startswith("+") else job.progress.finished_epochs
    problem = f"must be more than the {done} of {job.id}" if done else "must be 1 or more"
    try:
        more = int(text) - done
    except ValueError:
        more, problem = 0, "must be a number such as +5"
    if more < 1:
        raise typer.BadParameter(problem, param_hint="--epochs")
    return more


def _taken(row: CheckpointRow, rows: Sequence[CheckpointRow]) -> str:
    """Return which model was downloaded, and which other one may be wanted."""
    text = f"this is {_described(row)}"
    last = chosen(rows, LAST)
    if row.best and last and not row.last:
        text += f"; --last takes {_described(last)}"
    return text


def _described(row: CheckpointRow) -> str:
    kind = "the best model" if row.best else "the last model" if row.last else "a checkpoint"
    metrics = f": {metrics_text(row.metrics)}" if row.metrics else ""
    return f"{kind}, of {row.place or f'version {row.version}'}{metrics}"
