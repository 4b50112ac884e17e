"""All commands, by their subjects."""

from __future__ import annotations

from typing import Annotated

import typer

import vcasgd
from vcasgd.chaos import app as chaos
from vcasgd.cli import (
    control,
    demo,
    fleet,
    jobs,
    join,
    models,
    money,
    shell,
    simulate,
    stack,
    sweep,
)
from vcasgd.cli.data import app as data
from vcasgd.cli.output import Group
from vcasgd.cli.token import app as token

#: Commands by their panel in the help.
COMMANDS = {
    "Stack": (stack.up, stack.down, stack.status, stack.doctor, demo.demo),
    "Jobs": (
        jobs.submit,
        jobs.follow,
        jobs.jobs,
        jobs.show,
        jobs.events,
        jobs.logs,
        control.pause,
        control.resume,
        control.cancel,
        control.delete,
        models.checkpoints,
        models.download,
        models.extend,
        jobs.track,
        control.set_,
        sweep.sweep,
        sweep.compare,
        simulate.simulate,
    ),
    "Fleet": (
        fleet.top,
        fleet.workers,
        fleet.machines,
        fleet.pools,
        fleet.evict,
        shell.exec_,
        shell.ssh,
        join.join,
    ),
    "Costs": (money.plan, money.cost),
}

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # Reflows paragraphs of help texts.
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _panel, _commands in COMMANDS.items():
    for _command in _commands:
        app.command(_command.__name__.rstrip("_"), rich_help_panel=_panel)(_command)
for _name, _group, _panel, _help in (
    ("data", data, "Jobs", "Prepare sharded data sets."),
    ("token", token, "Stack", "Manage API tokens."),
    ("chaos", chaos, "Stack", "Inject faults and count lost samples."),
):
    app.add_typer(_group, name=_name, cls=Group, help=_help, rich_help_panel=_panel)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"vcasgd {vcasgd.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train PyTorch models on spot, preemptible, and volunteer machines.

    Commands connect to the API that --url or VCASGD_API_URL names. The default is the stack on
    this machine.
    """
