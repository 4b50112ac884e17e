"""Command for machines that join a stack elsewhere."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated

import typer

from vcasgd.agent.agent import Agent, LeaveSignals
from vcasgd.agent.availability import Availability, Hours, StackSilence, parse_until
from vcasgd.agent.display import Display
from vcasgd.agent.environment import visible
from vcasgd.agent.machine import measure
from vcasgd.agent.service import install
from vcasgd.agent.trust import GatewayAddress, JoinToken
from vcasgd.cli.output import err
from vcasgd.errors import SpecError, Unauthorized
from vcasgd.settings import load_settings


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Fleet")(join)


def join(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the gateway, https://….")],
    token: Annotated[
        str | None,
        typer.Option(
            "--token", help="Token for joining. Prefer $VCASGD_TOKEN, which hides it from ps."
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(help="Leave at this time (07:30) or after this long (8h)."),
    ] = None,
    hours: Annotated[
        str | None, typer.Option(help="Take part at these hours only, such as 22-6.")
    ] = None,
    max_cpu: Annotated[
        int | None, typer.Option(min=1, help="Most processors to use. Default: all.")
    ] = None,
    give_up: Annotated[
        str | None,
        typer.Option(
            help="Leave if the stack has not answered for this long, such as 1h.",
        ),
    ] = None,
    pass_env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Variable of yours that jobs may see. Repeatable."),
    ] = None,
    service: Annotated[
        bool,
        typer.Option("--service", help="Write a unit of systemd that joins with these options."),
    ] = False,
    instance: Annotated[
        str | None,
        typer.Option(help="Name of this machine, if the stack ordered it.", hidden=True),
    ] = None,
) -> None:
    """Join a stack elsewhere with this machine, and train for it until Ctrl-C.

    Needs only outgoing connections to URL. Ctrl-C pushes the work so far and leaves; a second one
    leaves at once. Workers have a low priority, see no variables of yours but those of the system,
    and leave nothing on this machine.
    """
    settings = load_settings()
    if token is None and settings.token is None:
        raise Unauthorized("no token", remedy="set VCASGD_TOKEN, or use --token")
    text = token or settings.secret("token")
    now = datetime.now(UTC).astimezone()
    schedule = Availability(
        until=parse_until(until, now) if until else None,
        hours=Hours.parse(hours) if hours else None,
    )
    parsed = JoinToken.parse(text)
    silence = StackSilence.parse(give_up)
    if service and until is not None:
        raise SpecError("a unit starts again after --until", remedy="use --hours", field="until")
    if service:
        unit = install(url, text, _options(hours, max_cpu, give_up, pass_env))
        err.print(f"wrote {unit}; to start it now and at every login, run")
        err.print(f"  systemctl --user enable --now {unit.name}")
        err.print("to run it also while you are logged out: loginctl enable-linger")
        return
    display, interrupts = Display(err), LeaveSignals()
    with interrupts.caught():
        try:
            display.state("measures this machine")
            gateway = GatewayAddress.of(url, parsed.pin, settings.ca_file)
            Agent(
                gateway,
                parsed,
                replace(measure(max_cpu), instance=instance),
                schedule=schedule,
                silence=silence,
                max_cpu=max_cpu,
                environment=visible(os.environ, pass_env or (), ordered=instance is not None),
                display=display,
                interrupts=interrupts,
            ).run()
        finally:
            display.close()


def _options(
    hours: str | None, max_cpu: int | None, give_up: str | None, pass_env: list[str] | None
) -> list[str]:
    """Return the options of a unit."""
    given = {"--hours": hours, "--max-cpu": max_cpu, "--give-up": give_up}
    pairs = [(name, str(value)) for name, value in given.items() if value is not None]
    return [part for pair in (*pairs, *(("--pass-env", each) for each in pass_env or ()))
            for part in pair]  # fmt: skip
