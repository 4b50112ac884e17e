"""Commands for the stack on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vcasgd import stack
from vcasgd.cli.output import (
    INTERRUPTED,
    Columns,
    Json,
    Token,
    Url,
    ago,
    err,
    open_client,
    out,
    plain,
    show_json,
    show_rows,
)
from vcasgd.doctor import Severity, describe_gpus, findings, knows_api
from vcasgd.errors import ApiError
from vcasgd.settings import Settings, load_settings
from vcasgd.stack import StackHome, StackPhase, StackState
from vcasgd.stack.layout import GATEWAY, kind_of

_PARTS: Columns = {
    "PART": lambda row: row["name"],
    "STATE": lambda row: "ready" if row["ready"] else "not ready" if row["pid"] else "down",
    "PID": lambda row: row["pid"] or None,
    "STARTED": lambda row: ago(row["started_at"] if row["pid"] else None),
    "RESTARTS": lambda row: row["restarts"],
    "LOG": lambda row: row["log"],
}

StoreNodes = Annotated[
    int | None,
    typer.Option(
        "--store-nodes",
        min=1,
        max=64,
        help="Store nodes to shard models across.",
    ),
]
Replicas = Annotated[
    int | None,
    typer.Option(min=0, max=1, help="Replicas per server, with Sentinel failover."),
]
Home = Annotated[
    Path | None,
    typer.Option("--home", help="Stack folder (default: $VCASGD_HOME, then ~/.vcasgd)."),
]


def up(
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            help="API port; 0 picks a free one (default: the last one, or 8700).",
        ),
    ] = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Run in the foreground until Ctrl-C.")
    ] = False,
    store_nodes: StoreNodes = None,
    replicas: Replicas = None,
    join_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            help="TLS port for machines that join; 0 picks a free one (default: none).",
        ),
    ] = None,
    home: Home = None,
) -> None:
    """Start a stack on this machine, and return when it is ready."""
    settings = _settings(
        home=home, api_port=port, store_nodes=store_nodes, replicas=replicas, join_port=join_port
    )
    if foreground:
        _run_in_foreground(settings)
    with _interruptible(settings, "the stack goes on starting; stop it with: vcasgd down"):
        state = stack.up(settings, progress=ReadyPrinter(err))
    out.print(f"the stack is up; API and dashboard: {state.api_url}")
    if GATEWAY in state.ports and settings.join_port is not None:
        port = state.ports[GATEWAY]
        out.print(f"machines can join at port {port}: vcasgd token create --help")
    token_file = StackHome(settings.home).token_file
    out.print(f"home {settings.home_path}, token in {token_file}")


def down(home: Home = None) -> None:
    """Stop the stack and all its machines. Jobs resume at the next vcasgd up.

    Exits with status 1 if machines may still run.
    """
    settings = _settings(home=home)
    with _interruptible(settings, "the stack goes on stopping; wait for it with: vcasgd down"):
        was_running = stack.down(settings, lambda doing: err.print(f"  {doing}"))
    if was_running:
        out.print("the stack is down")
    else:
        out.print(f"no stack was running in {settings.home_path}")


def status(as_json: Json = False, home: Home = None, url: Url = None, token: Token = None) -> None:
    """Show the stack's parts, and how many jobs and machines there are.

    Exits with status 1 if the stack is not ready.
    """
    settings = _settings(home=home)
    remote = url is not None or "api_url" in settings.model_fields_set
    value: dict[str, Any] = {} if remote else _local_status(settings)
    if remote or value["phase"] == StackPhase.READY:
        try:
            with open_client(url, token, settings) as client:
                value["platform"] = plain(client.status())
        except ApiError as error:
            if remote:
                raise
            # The parts are what to look at when the API has a problem.
            value["problem"] = str(error)
            kind = str(error.details.get("problem", {}).get("type"))
            for part in value["parts"]:
                # The supervisor only sees that it answers.
                no_ledger = (
                    kind.endswith(":store-unavailable") and kind_of(part["name"]) == "ledger"
                )
                part["ready"] = part["ready"] and not no_ledger
    if as_json:
        show_json(value)
    else:
        _show_status(value)
        if "problem" in value:
            err.print(value["problem"])
    if "platform" not in value:
        raise typer.Exit(1)


def doctor(as_json: Json = False, url: Url = None, token: Token = None) -> None:
    """Check this installation and its API. Exits with status 1 if there is an error.

    It checks versions, settings, ports, memory, disk, clocks, permissions, prices, quotas, and
    whether the API and its controller work. It changes nothing.
    """
    found = findings(url, token)
    if as_json:
        show_json([asdict(finding) for finding in found])
    else:
        for line in describe_gpus():
            out.print(line)
        for finding in found:
            out.print(f"{finding.severity}: {finding.message}")
            out.print(f"  remedy: {finding.remedy}")
        if not found:
            out.print("nothing is wrong")
        if not knows_api(url):
            out.print("no API was checked: no stack runs here, and --url names none")
    if any(finding.severity is Severity.ERROR for finding in found):
        raise typer.Exit(1)


def _settings(**options: object) -> Settings:
    update = {name: value for name, value in options.items() if value is not None}
    return load_settings().model_copy(update=update)


@contextmanager
def _interruptible(settings: Settings, text: str) -> Iterator[None]:
    """Exit the command on Ctrl-C, and print what the stack still does, if it runs."""
    try:
        yield
    except KeyboardInterrupt:
        if stack.is_running(settings.home_path):
            err.print(f"\n{text}")
        raise typer.Exit(INTERRUPTED) from None


def _run_in_foreground(settings: Settings) -> None:
    """Replace this process with the stack's guardian."""
    stack.require_libraries()
    if stack.is_running(settings.home_path):
        stack.up(settings)  # Raises the error for a running stack.
    os.environ |= stack.environment(settings)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "vcasgd.stack"])


class ReadyPrinter:
    """Progress callback that prints each part of the stack when it becomes ready."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ready: set[str] = set()

    def __call__(self, state: StackState) -> None:
        if state.phase not in (StackPhase.STARTING, StackPhase.READY):
            return
        for name, part in state.parts.items():
            if part.ready and name not in self._ready:
                self._ready.add(name)
                self._console.print(f"  {name} is ready")


def _local_status(settings: Settings) -> dict[str, Any]:
    state = StackState.read(settings.home_path)
    home = StackHome(settings.home)
    running = stack.is_running(settings.home_path)
    parts = [
        {
            "name": name,
            # A supervisor that was killed left the state of its parts as it was.
            "pid": part.pid if part.alive else 0,
            "ready": part.ready and part.alive,
            "started_at": part.started_at,
            "restarts": part.restarts,
            "log": str(home.log(name)),
        }
        for name, part in state.parts.items()
    ]
    phase = state.phase if running else StackPhase.STOPPED
    return {"phase": phase, "home": str(home.path), "api_url": state.api_url, "parts": parts}


def _show_status(value: dict[str, Any]) -> None:
    if "phase" in value:
        phase, parts = value["phase"], value["parts"]
        if "problem" in value or (phase == StackPhase.READY and not all(p["ready"] for p in parts)):
            phase = "not ready"
        url = f", {value['api_url']}" if value["api_url"] else ""
        out.print(f"stack in {value['home']}: {phase}{url}")
        if parts:
            show_rows(parts, _PARTS, as_json=False)
    if "platform" in value:
        platform = value["platform"]
        controller = "running" if platform["controller"] else "not running"
        out.print(
            f"vcasgd {platform['version']}: controller {controller}; active jobs: "
            f"{len(platform['active_jobs'])}, machines: {platform['machines']}, workers: "
            f"{platform['workers']}",
        )
        if platform["ledger_full"]:
            err.print(
                "the ledger is at its memory limit: new jobs are refused, running jobs continue",
            )
