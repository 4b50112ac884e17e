"""``vcasgd chaos``: faults on purpose, from the command line."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Faults on purpose.")


@app.callback()
def chaos() -> None:
    """Faults on purpose."""


@app.command("audit")
def audit_command(
    kills: Annotated[int, typer.Option(help="How many processes and machines to kill.")] = 12,
    seed: Annotated[int, typer.Option(help="Of the moments and the victims.")] = 7,
    store_nodes: Annotated[
        int, typer.Option("--store-nodes", min=1, max=64, help="Over which the model is cut.")
    ] = 1,
    replicas: Annotated[
        int, typer.Option(min=0, max=1, help="Of each server; with one, primaries die for good.")
    ] = 0,
    as_json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Kill everything while a job trains that counts, and prove that nothing was lost or repeated.

    Starts a stack of its own in a temporary folder. Exit status 0 only if every sample of
    every epoch was applied exactly once and every kill really happened.
    """
    # torch takes seconds to import, and no other command needs it
    from vcasgd.chaos.audit import AuditOptions, as_json, audit, describe

    report = audit(
        AuditOptions(kills=kills, seed=seed, store_nodes=store_nodes, replicas=replicas),
        say=lambda text: typer.echo(text, err=as_json_),
    )
    if as_json_:
        typer.echo(json.dumps(as_json(report)))
    else:
        for line in describe(report):
            typer.echo(line)
    raise typer.Exit(0 if report.passed else 1)
