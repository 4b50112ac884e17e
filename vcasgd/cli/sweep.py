"""Commands for many jobs: sweeps, and comparison of jobs."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError

from vcasgd.cli.jobfile import load_job, show_warnings
from vcasgd.cli.money import Changes, confirm
from vcasgd.cli.output import (
    INTERRUPTED,
    Columns,
    Json,
    Token,
    Url,
    duration,
    err,
    open_client,
    out,
    show_json,
    show_rows,
)
from vcasgd.client import Job
from vcasgd.client.sweep import Axis, Sweep, SweepOptions, grid, sample
from vcasgd.client.sweep import compare as compared
from vcasgd.settings import load_settings
from vcasgd.spec.job import JobState
from vcasgd.spec.sections import Metric, metric_text

MetricName = Annotated[
    str | None,
    typer.Option(help="Metric to rank jobs by (default: the one that ranks their models)."),
]
Mode = Annotated[
    Literal["min", "max"] | None,
    typer.Option(
        help="Whether to minimize or maximize --metric (default: inferred for common metrics)."
    ),
]


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="Job file, or its folder.")],
    over: Annotated[
        list[str],
        typer.Option(
            metavar="FIELD=VALUES",
            help="Field and its values: a,b,c, or with --random also uniform(a,b), "
            "log(a,b), or int(a,b). Repeatable.",
        ),
    ],
    draws: Annotated[
        int | None,
        typer.Option("--random", min=1, max=1000, help="Number of random combinations."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    at_once: Annotated[int, typer.Option(min=1, help="Concurrent jobs.")] = 4,
    early_stop: Annotated[
        int | None,
        typer.Option(min=1, help="Cancel jobs below the median after this many evaluations."),
    ] = None,
    max_cost_usd: Annotated[
        float | None, typer.Option(min=0.01, help="Total budget of all jobs in USD.")
    ] = None,
    metric: MetricName = None,
    mode: Mode = None,
    name: Annotated[
        str | None, typer.Option(help="Sweep name; reuse it to resume an interrupted sweep.")
    ] = None,
    changes: Changes = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")] = False,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Run a job file with several values of its fields, and compare the results.

    Without --random, all combinations run. Ctrl-C stops the command; its jobs keep running.
    """
    axes = [Axis.parse(text) for text in over]
    trials = grid(axes) if draws is None else sample(axes, draws, seed)
    specs = {trial: load_job(file, [*(changes or ()), *trial]) for trial in trials}
    first, name = specs[trials[0]], name or uuid.uuid4().hex[:8]
    show_warnings(first)
    ranked = _ranked(metric, mode)
    limit_mb = load_settings().package_limit_mb
    options = SweepOptions(name, at_once, early_stop, max_cost_usd, ranked, limit_mb)
    with open_client(url, token) as client:
        err.print(f"sweep {name}: {len(trials)} jobs, {at_once} at a time")
        if not yes:
            confirm(client, first, len(trials))
        try:
            jobs = Sweep(client, specs, options, lambda line: err.print(line)).run()
        except KeyboardInterrupt:
            err.print(f"\nthe jobs keep running; continue with: --name {name}")
            raise typer.Exit(INTERRUPTED) from None
        _show(jobs, ranked, as_json=as_json)
    failed = [job for job in jobs if job.state is JobState.FAILED]
    for job in failed:
        err.print(f"error: job {job.id} failed: {job.reason or 'no reason given'}")
    if failed:
        raise typer.Exit(1)


def compare(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB", help="Job IDs or names.")],
    metric: MetricName = None,
    mode: Mode = None,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Compare jobs: best value, speed, cost, and what is different in their files."""
    with open_client(url, token) as client:
        found = [client.job(job) for job in jobs]
        ranked = _ranked(metric, mode)
        _show(found, ranked, as_json=as_json)


def _ranked(metric: str | None, mode: str | None) -> Metric | None:
    if metric is None:
        return None
    try:
        return Metric.model_validate({"name": metric, "mode": mode} if mode else metric)
    except ValidationError:
        problem = f"is needed: it isn't known whether lower values of {metric} are better"
        raise typer.BadParameter(problem, param_hint="--mode") from None


def _show(jobs: Sequence[Job], metric: Metric | None, *, as_json: bool) -> None:
    rows = compared(jobs, metric)
    if as_json:
        show_json(rows)
        return
    if not rows:
        out.print("no jobs")
        return
    columns: Columns = {
        "JOB": lambda row: row["job"],
        "STATE": lambda row: row["state"],
        "BEST": lambda row: (
            None if row["best"] is None else metric_text(row["metric"], row["best"])
        ),
        **{
            each.removeprefix("args.").upper(): _difference(each) for each in rows[0]["differences"]
        },
        "SAMPLES": lambda row: row["samples"],
        "TOOK": lambda row: duration(row["seconds"]),
        "USD": lambda row: f"{row['spent_usd']:.4f}",
    }
    show_rows(rows, columns, as_json=False)


def _difference(field: str) -> Any:
    return lambda row: row["differences"][field]
