"""``vcasgd chaos``: faults on a real stack, during a job that counts lost and repeated samples.

``audit``        kills of every kind of process
``killers``      those faults, with checks that they fired and that the stack recovered
``scenario``     faults at given times, and what they may cost
``run``          the run of a scenario
``faults``       frozen processes, slow and full disks, a pool with fewer machines, wall clocks
``network``      lost packets
``audited_job``  the job, its count, and the evidence of a failure
``task``         the task that counts samples
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from vcasgd.chaos.audited_job import CountReport

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")


@app.callback()
def chaos() -> None:
    """Inject faults and count lost samples."""
    from vcasgd.stack import require_libraries

    require_libraries()


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
    from vcasgd.chaos.audit import audit, describe

    report = audit(
        lambda text: typer.echo(text, err=as_json_),
        kills=kills,
        seed=seed,
        store_nodes=store_nodes,
        replicas=replicas,
    )
    _print_report(report, describe(report), as_json=as_json_)


@app.command("run")
def run_command(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="Scenario.")],
    as_json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Inject the faults of a scenario during a job, and compare their cost with the expected one.

    Starts a stack in a temporary folder. Exits with status 0 only if every fault fired and cost no
    more than the scenario expects.
    """
    from vcasgd.chaos.run import describe_scenario, run_scenario
    from vcasgd.chaos.scenario import Scenario

    report = run_scenario(Scenario.load(file), log=lambda text: typer.echo(text, err=as_json_))
    _print_report(report, describe_scenario(report), as_json=as_json_)


def _print_report(report: CountReport, lines: Iterable[str], *, as_json: bool) -> NoReturn:
    for line in [json.dumps(report.as_json())] if as_json else lines:
        typer.echo(line)
    raise typer.Exit(0 if report.passed else 1)
