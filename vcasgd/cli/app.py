"""The commands, joined."""

from __future__ import annotations

from typing import Annotated

import typer

import vcasgd
from vcasgd.bench.command import app as bench
from vcasgd.chaos.command import app as chaos
from vcasgd.cli import demo, fleet, jobs, money, simulate, stack
from vcasgd.cli.data import app as data
from vcasgd.cli.output import Group

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _part in (stack, jobs, fleet, money, simulate, demo):
    _part.register(app)
app.add_typer(data, name="data", cls=Group, help="Data sets in shards.")
app.add_typer(bench, name="bench", cls=Group, help="Measure the product on this machine.")
app.add_typer(chaos, name="chaos", cls=Group, help="Kill parts on purpose, and count what is lost.")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vcasgd {vcasgd.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train PyTorch models on machines that vanish.

    They talk to the API that --url or VCASGD_API_URL names, else to this machine's stack.
    """


def main() -> None:
    app(prog_name="vcasgd")
