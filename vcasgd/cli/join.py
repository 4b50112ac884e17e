"""Command for machines that join a stack elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from vcasgd.agent.agent import Agent, Display, LeaveSignals
from vcasgd.agent.availability import (
    Availability,
    Hours,
    OwnerInput,
    StackSilence,
    Terms,
    measure,
    parse_until,
    usable_processors,
)
from vcasgd.agent.connection import AgentConnection, GatewayAddress, JoinToken
from vcasgd.agent.installation import install, restart, update_to
from vcasgd.agent.sandbox import Sandbox, SandboxMode, choose, make_sandbox
from vcasgd.child_process import hide_process, visible
from vcasgd.cli.output import err
from vcasgd.errors import SpecError, Unauthorized, VersionDiffers
from vcasgd.settings import load_settings

Url = Annotated[str, typer.Argument(metavar="URL", help="URL of the gateway, https://….")]
Token = Annotated[
    str | None,
    typer.Option("--token", help="Join token. Prefer $VCASGD_TOKEN, which ps does not show."),
]
Until = Annotated[
    str | None, typer.Option(help="Leave at this time (07:30) or after this duration (8h).")
]
HoursText = Annotated[str | None, typer.Option(help="Only run during these hours, such as 22-6.")]
WhenIdle = Annotated[
    str | None,
    typer.Option(help="Only run after no keyboard or mouse input for this long, such as 10m."),
]
MaxCpu = Annotated[int | None, typer.Option(min=1, help="CPU limit (default: all).")]
GiveUp = Annotated[
    str | None,
    typer.Option(help="Leave if the stack is unreachable for this long, such as 1h."),
]
PassEnv = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Environment variable to pass to jobs. Repeatable."),
]
SandboxUse = Annotated[
    SandboxMode | None,
    typer.Option(
        help="Whether jobs must run in a sandbox: require or off.",
        show_default="require",
    ),
]
MaxMemory = Annotated[str | None, typer.Option(help="Memory limit for a worker (default: 70%).")]
MaxDisk = Annotated[
    str | None,
    typer.Option(help="Limit for files a worker writes, kept in RAM (default: 10% of it)."),
]
Share = Annotated[
    list[Path] | None,
    typer.Option(metavar="FOLDER", help="Folder to share with jobs, read-only. Repeatable."),
]
AllowNetwork = Annotated[
    bool, typer.Option("--allow-network", help="Give jobs full network access.")
]
Update = Annotated[
    bool,
    typer.Option(
        "--update",
        help="Upgrade with pip when the stack has a newer version.",
    ),
]
Service = Annotated[
    bool,
    typer.Option("--service", help="Write a systemd unit that joins with these options."),
]
OrderedAs = Annotated[
    str | None, typer.Option(help="Name of this machine, if the stack ordered it.", hidden=True)
]
_TOKEN = "VCASGD_TOKEN"


def join(
    url: Url,
    token: Token = None,
    until: Until = None,
    hours: HoursText = None,
    when_idle: WhenIdle = None,
    max_cpu: MaxCpu = None,
    give_up: GiveUp = None,
    pass_env: PassEnv = None,
    sandbox: SandboxUse = None,
    max_memory: MaxMemory = None,
    max_disk: MaxDisk = None,
    share: Share = None,
    allow_network: AllowNetwork = False,
    update: Update = False,
    service: Service = False,
    machine: OrderedAs = None,
) -> None:
    """Join a stack elsewhere with this machine, and train for it until Ctrl-C.

    Needs only outgoing connections to URL. Ctrl-C pushes the work so far and leaves; a second one
    leaves at once. Workers have a low priority, see no variables of yours but those of the system,
    run in a sandbox, and leave nothing on this machine.
    """
    hide_process()
    settings = load_settings()
    if token is None and settings.token is None:
        raise Unauthorized("no token", remedy="set VCASGD_TOKEN to a token of vcasgd token create")
    text = token or settings.required("token")
    os.environ.pop(_TOKEN, None)
    for name in set(pass_env or ()) - set(os.environ):
        err.print(f"warning: --pass-env {name}: there is no such variable here")
    now = datetime.now(UTC).astimezone()
    processors = usable_processors(max_cpu)
    box = make_sandbox(processors, max_memory, max_disk, share or (), network=allow_network)
    terms = Terms(
        schedule=Availability(
            until=parse_until(until, now) if until else None,
            hours=Hours.parse(hours) if hours else None,
        ),
        owner=OwnerInput.parse(when_idle) if when_idle else None,
        silence=StackSilence.parse(give_up),
        processors=processors,
        environment=visible(os.environ, pass_env or (), ordered=machine is not None),
        sandbox=None,
    )
    join_token = JoinToken.parse(text)
    if not service:
        # A machine that the stack ordered has no other purpose.
        mode = sandbox or (SandboxMode.REQUIRE if machine is None else SandboxMode.OFF)
        gateway = partial(GatewayAddress.of, url, join_token.pin, settings.ca_file)
        _take_part(gateway, join_token, machine, terms, box, mode, updates=update)
        return
    if until is not None:
        raise SpecError("a unit starts again after --until", remedy="use --hours", field="until")
    given = {"--hours": hours, "--when-idle": when_idle, "--max-cpu": max_cpu,
             "--give-up": give_up, "--sandbox": sandbox,
             "--max-memory": max_memory, "--max-disk": max_disk}  # fmt: skip
    lists = {"--pass-env": pass_env, "--share": box.shared}
    flags = [*_flag("--allow-network", allow_network), *_flag("--update", update)]
    unit, replaced = install(url, text, [*_options(given, lists), *flags], box)
    if replaced is not None:
        err.print(f"replaced the unit that joined {replaced or 'an unknown stack'}")
    err.print(f"wrote {unit}; to start it now and at every login, run")
    err.print(f"  systemctl --user enable {unit.name}")
    err.print(f"  systemctl --user restart {unit.name}")
    err.print("to run it also while you are logged out: loginctl enable-linger")


def _take_part(
    connect: Callable[[], GatewayAddress],
    token: JoinToken,
    machine: str | None,
    terms: Terms,
    box: Sandbox,
    mode: SandboxMode,
    *,
    updates: bool,
) -> None:
    """Train until the machine leaves; then start again if another version is installed.

    ``machine``: its name, if the stack ordered it.
    """
    display, interrupts = Display(err), LeaveSignals(at_once=True)
    with interrupts.caught():
        try:
            gateway = connect()
            with closing(AgentConnection(gateway, token, secret="")) as connection:
                connection.check_token()
            display.state("measures this machine")
            measured = measure(terms.processors, machine)
            used, line = choose(mode, box, measured.gpus)
            display.event(line)
            if terms.owner is not None:
                display.event(str(terms.owner))
            Agent(gateway, token, measured, replace(terms, sandbox=used), display, interrupts).run()
            return
        except VersionDiffers as differs:
            update_to(differs.version, allowed=updates, show=display.event)
            version = differs.version
        finally:
            display.close()
    schedule = terms.schedule
    if not interrupts.count and not schedule.over(datetime.now(UTC).astimezone()):
        # A duration would begin again.
        more = ["--until", schedule.until.isoformat()] if schedule.until else []
        whole = ".".join(filter(None, (token.text, token.pin)))
        restart(more, {**os.environ, _TOKEN: whole}, version)


def _options(
    given: Mapping[str, object], lists: Mapping[str, Iterable[object] | None]
) -> list[str]:
    """Return the options of a unit; those of ``lists`` can be given several times."""
    pairs = [(name, str(value)) for name, value in given.items() if value is not None]
    pairs += [(name, str(value)) for name, values in lists.items() for value in values or ()]
    return [part for pair in pairs for part in pair]


def _flag(name: str, given: bool) -> list[str]:
    return [name] if given else []
