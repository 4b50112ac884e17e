"""``vcasgd doctor``: what is wrong with this installation, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict

import typer

from vcasgd.cli.connection import Token, Url
from vcasgd.cli.output import Json, out, show_json
from vcasgd.doctor import Severity, findings


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Stack")(doctor)


def doctor(as_json: Json = False, url: Url = None, token: Token = None) -> None:
    """Check this installation and its API. Exits with status 1 if there is an error.

    It checks versions, settings, ports, memory, disk, clocks, permissions, prices, quotas, and
    whether the API and its controller work. It changes nothing.
    """
    found = findings(url, token)
    if as_json:
        show_json([asdict(finding) for finding in found])
    else:
        for finding in found:
            out.print(f"{finding.severity}: {finding.message}")
            out.print(f"  remedy: {finding.remedy}")
        if not found:
            out.print("nothing is wrong")
    if any(finding.severity is Severity.ERROR for finding in found):
        raise typer.Exit(1)
