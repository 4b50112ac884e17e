"""Command for machines that join a stack elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from vcasgd.agent.agent import Agent, LeaveSignals
from vcasgd.agent.availability import Availability, Hours, StackSilence, parse_until
from vcasgd.agent.display import Display
from vcasgd.agent.environment import visible
from vcasgd.agent.machine import measure, usable_processors
from vcasgd.agent.owner_input import OwnerInput
from vcasgd.agent.sandbox import SandboxMode, choose, make_sandbox
from vcasgd.agent.service import install
from vcasgd.agent.trust import GatewayAddress, JoinToken
from vcasgd.agent.update import restart, update_to
from vcasgd.cli.output import err
from vcasgd.errors import SpecError, Unauthorized, VersionDiffers
from vcasgd.settings import load_settings
from vcasgd.spec.public import parse_nickname


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
    when_idle: Annotated[
        str | None,
        typer.Option(
            help="Pause until this long after your last input on this machine, such as 10m."
        ),
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
    nickname: Annotated[
        str | None,
        typer.Option(
            help="Your name on the stack's public page, if it has one; anonymous removes it."
        ),
    ] = None,
    sandbox: Annotated[
        SandboxMode | None,
        typer.Option(
            help="Run jobs in a sandbox: where it works (auto), or else refuse to join (require).",
            show_default="auto",
        ),
    ] = None,
    max_memory: Annotated[
        str | None, typer.Option(help="Most memory of a job's worker. Default: 70 %.")
    ] = None,
    max_disk: Annotated[
        str | None,
        typer.Option(help="Most files of a worker, which are in memory. Default: 10 % of it."),
    ] = None,
    share: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Folder that jobs may read. Repeatable."),
    ] = None,
    allow_network: Annotated[
        bool, typer.Option("--allow-network", help="Let jobs reach all that this machine reaches.")
    ] = False,
    update: Annotated[
        bool,
        typer.Option(
            "--update",
            help="If the stack has a newer version, install it with pip, and join again.",
        ),
    ] = False,
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
    run in a sandbox where one works, and leave nothing on this machine.
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
    owner = OwnerInput.parse(when_idle) if when_idle else None
    parsed = JoinToken.parse(text)
    silence = StackSilence.parse(give_up)
    name = parse_nickname(nickname) if nickname is not None else None
    box = make_sandbox(
        usable_processors(max_cpu), max_memory, max_disk, share or (), network=allow_network
    )
    if service and until is not None:
        raise SpecError("a unit starts again after --until", remedy="use --hours", field="until")
    if service:
        given = {"--hours": hours, "--when-idle": when_idle, "--max-cpu": max_cpu,
                 "--give-up": give_up, "--sandbox": sandbox, "--nickname": name,
                 "--max-memory": max_memory, "--max-disk": max_disk}  # fmt: skip
        lists = {"--pass-env": pass_env, "--share": box.shared}
        unit = install(
            url,
            text,
            [
                *_options(given, lists),
                *_flag("--allow-network", allow_network),
                *_flag("--update", update),
            ],
            box,
        )
        err.print(f"wrote {unit}; to start it now and at every login, run")
        err.print(f"  systemctl --user enable --now {unit.name}")
        err.print("to run it also while you are logged out: loginctl enable-linger")
        return
    # A machine that the stack ordered has no other purpose.
    mode = sandbox or (SandboxMode.AUTO if instance is None else SandboxMode.OFF)
    display, interrupts = Display(err), LeaveSignals()
    with interrupts.caught():
        try:
            display.state("measures this machine")
            gateway = GatewayAddress.of(url, parsed.pin, settings.ca_file)
            machine = replace(measure(max_cpu), instance=instance, nickname=name)
            used, line = choose(mode, box, machine.gpus)
            display.event(line)
            if owner is not None:
                display.event(str(owner))
            Agent(
                gateway,
                parsed,
                machine,
                schedule=schedule,
                owner=owner,
                silence=silence,
                max_cpu=max_cpu,
                environment=visible(os.environ, pass_env or (), ordered=instance is not None),
                sandbox=used,
                display=display,
                interrupts=interrupts,
            ).run()
            return
        except VersionDiffers as differs:
            update_to(
                differs.version,
                allowed=update,
                stopped=lambda: interrupts.count > 0,
                show=display.event,
            )
        finally:
            display.close()
    if not interrupts.count and not schedule.over(datetime.now(UTC).astimezone()):
        # A duration would begin again.
        restart(["--until", schedule.until.isoformat()] if schedule.until else [])


def _options(
    given: Mapping[str, object], lists: Mapping[str, Iterable[object] | None]
) -> list[str]:
    """Return the options of a unit; those of ``lists`` can be given several times."""
    pairs = [(name, str(value)) for name, value in given.items() if value is not None]
    pairs += [(name, str(value)) for name, values in lists.items() for value in values or ()]
    return [part for pair in pairs for part in pair]


def _flag(name: str, given: bool) -> list[str]:
    return [name] if given else []
