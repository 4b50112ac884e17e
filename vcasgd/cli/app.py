"""The ``vcasgd`` application with all of its commands."""

from __future__ import annotations

from typing import Annotated

import typer

import vcasgd
from vcasgd.chaos import app as chaos
from vcasgd.cli import demo, fleet, jobs, join, money, simulate, stack, sweep
from vcasgd.cli.data import app as data
from vcasgd.cli.output import Group
from vcasgd.cli.token import app as token

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # Reflows paragraphs of help texts.
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _module in (stack, jobs, sweep, fleet, join, money, simulate, demo):
    _module.register(app)
app.add_typer(data, name="data", cls=Group, help="Prepare sharded data sets.")
app.add_typer(token, name="token", cls=Group, help="Manage API tokens.")
app.add_typer(chaos, name="chaos", cls=Group, help="Inject faults and count lost samples.")


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
    """Train PyTorch models on spot, preemptible and volunteer machines.

    Commands connect to the API that --url or VCASGD_API_URL names. The default is the stack on
    this machine.
    """


def main() -> None:
    app(prog_name="vcasgd")
