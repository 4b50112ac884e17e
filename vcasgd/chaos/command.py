"""``vcasgd chaos``: command-line interface of fault injection."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")


@app.callback()
def chaos() -> None:
    """Inject faults and count lost samples."""


@app.command("audit")
def audit_command(
    kills: Annotated[int, typer.Option(help="Number of processes and machines to kill.")] = 12,
    seed: Annotated[int, typer.Option(help="Random seed for kill times and targets.")] = 7,
    store_nodes: Annotated[
        int,
        typer.Option(
            "--store-nodes", min=1, max=64, help="Number of store nodes to shard the model over."
        ),
    ] = 1,
    replicas: Annotated[
        int,
        typer.Option(min=0, max=1, help="Replicas of each server; with one, primaries fail over."),
    ] = 0,
    as_json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Kill processes during a job, and check that no sample is lost or repeated.

    Starts a stack in a temporary folder. Exits with status 0 only if every sample of every epoch
    was applied exactly once and every fault fired.
    """
    # Imported here because torch takes seconds to import.
    from vcasgd.chaos.audit import AuditOptions, audit, describe

    report = audit(
        AuditOptions(kills=kills, seed=seed, store_nodes=store_nodes, replicas=replicas),
        log=lambda text: typer.echo(text, err=as_json_),
    )
    for line in [json.dumps(report.as_json())] if as_json_ else describe(report):
        typer.echo(line)
    raise typer.Exit(0 if report.passed else 1)
