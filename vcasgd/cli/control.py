"""Commands that change jobs: pause, resume, cancel, delete, and their priority."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from vcasgd.cli.jobfile import parse_changes
from vcasgd.cli.jobs import priority_text, state_name
from vcasgd.cli.output import JobName, Token, Url, err, open_client, out, show_error
from vcasgd.client import Client, Job
from vcasgd.errors import ApiError, Conflict, Forbidden
from vcasgd.schemas.jobs import JobView

JobNames = Annotated[list[str] | None, typer.Argument(metavar="JOB", help="Job IDs or names.")]
All = Annotated[bool, typer.Option("--all", help="All jobs that you can change.")]
OnlyState = Annotated[
    str | None,
    typer.Option(
        "--state", metavar="STATE", parser=state_name, help="With --all: only in this state."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")]


def pause(
    jobs: JobNames = None, every: All = False, state: OnlyState = None,
    url: Url = None, token: Token = None,
) -> None:  # fmt: skip
    """Pause jobs. Their workers stop; their progress is kept."""
    with open_client(url, token) as client:
        found = _chosen(client, jobs, every, state, "running")
        _change(found, lambda job: _state(job.pause()), every)


def resume(
    jobs: JobNames = None,
    max_cost_usd: Annotated[
        float | None, typer.Option(min=0.01, help="New total budget of each job in USD.")
    ] = None,
    every: All = False,
    state: OnlyState = None,
    url: Url = None,
    token: Token = None,
) -> None:
    """Resume paused jobs."""
    with open_client(url, token) as client:
        found = _chosen(client, jobs, every, state, "paused")
        _change(found, lambda job: _state(job.resume(max_cost_usd)), every)


def set_(
    job: JobName,
    changes: Annotated[
        list[str], typer.Argument(metavar="FIELD=VALUE", help="priority=… or weight=…")
    ],
    url: Url = None,
    token: Token = None,
) -> None:
    """Change the priority or the weight of a job that has not ended."""
    fields = parse_changes(changes)
    with open_client(url, token) as client:
        view = client.job(job).change(**fields)
        spec = view.spec
        out.print(f"{view.id}: priority {priority_text(spec.priority, spec.weight)}")


def cancel(
    jobs: JobNames = None, every: All = False, state: OnlyState = None, yes: Yes = False,
    url: Url = None, token: Token = None,
) -> None:  # fmt: skip
    """Cancel jobs permanently. Their checkpoints are kept. With --all, asks first."""
    with open_client(url, token) as client:
        found = _chosen(client, jobs, every, state, "active")
        if found and every and not yes:
            names = ", ".join(job.id for job in found)
            typer.confirm(f"Cancel {names}?", abort=True, err=True)
        _change(found, lambda job: _state(job.cancel()), every)


def delete(
    jobs: JobNames = None,
    every: All = False,
    state: OnlyState = None,
    yes: Yes = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Delete jobs that have ended, with their history, checkpoints, and models."""
    with open_client(url, token) as client:
        found = [job for job in _chosen(client, jobs, every, state) if job.over or not every]
        if found and not yes:
            names = ", ".join(job.id for job in found)
            typer.confirm(f"Delete {names} with checkpoints and models?", abort=True, err=True)
        _change(found, _deleted, every)


def _chosen(
    client: Client,
    names: list[str] | None,
    every: bool,
    state: str | None,
    default: str | None = None,
) -> list[Job]:
    """Return the jobs of these names, or all in a state. Raises :class:`NotFound`."""
    if bool(names) == every or (names and state):
        raise typer.BadParameter("name jobs, or use --all, also with --state")
    found = client.jobs(state or default) if every else [client.job(name) for name in names or ()]
    if not found:
        err.print("no jobs")
    return found


def _change(jobs: Iterable[Job], change: Callable[[Job], str], every: bool) -> None:
    """Change jobs, print what became of them, and exit with 1 if one could not be changed.

    With ``every``, jobs of other users, and those that have changed meanwhile, are skipped.
    """
    refused: ApiError | None = None
    for job in jobs:
        try:
            out.print(change(job), highlight=False)
        except (Conflict, Forbidden) as error:
            if not every:
                refused = refused or error
                show_error(error)
    if refused:
        raise typer.Exit(1)


def _state(view: JobView) -> str:
    return f"{view.id} {view.state.phrase}"


def _deleted(job: Job) -> str:
    job.delete()
    return f"{job.id} is deleted"
