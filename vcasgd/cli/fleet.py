"""Commands for machines and workers."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from vcasgd.cli.connection import Token, Url, open_client
from vcasgd.cli.output import Columns, Json, ago, duration, out, show_json, show_rows, size
from vcasgd.cli.top import top
from vcasgd.errors import FleetError

#: Seconds for the controller's next round, and for the provider's answer.
RESULT_SECONDS = 60.0
#: Seconds between two looks at the result.
POLL_SECONDS = 0.2

_WORKERS: Columns = {
    "WORKER": lambda row: row["name"],
    "MACHINE": lambda row: row.get("machine"),
    "DOING": lambda row: row.get("quarantined") or row.get("leaving") or row.get("doing"),
    "STEPS": lambda row: row.get("steps"),
    "PER PUSH": lambda row: row.get("local_steps"),
    "SAMPLES": lambda row: row.get("samples"),
    "PUSHED": lambda row: size(row.get("pushed_bytes")),
    "FETCHED": lambda row: size(row.get("fetched_bytes")),
    "HEARTBEAT": lambda row: ago(row.get("at")),
}
_MACHINES: Columns = {
    "MACHINE": lambda row: row["id"],
    "POOL": lambda row: f"{row.get('pool')}{' (removed)' if row.get('pool_removed') else ''}",
    "STATE": lambda row: "unreachable" if row.get("problem") else row.get("state"),
    "JOB": lambda row: row.get("job"),
    "LAUNCHED": lambda row: ago(row.get("launched_at")),
    "ZONE": lambda row: row.get("zone"),
    "TYPE": lambda row: row.get("machine_type"),
    "USD/H": lambda row: row.get("price_per_hour"),
}
_POOLS: Columns = {
    "POOL": lambda row: row["name"],
    "MACHINES": lambda row: row.get("machines"),
    "LAUNCHES": lambda row: row.get("launches"),
    "TRUST": lambda row: row.get("trust"),
    "LABELS": lambda row: ", ".join(row.get("labels") or ()) or None,
    "BLOCKED": lambda row: row.get("reason"),
}


def register(app: typer.Typer) -> None:
    for command in (top, workers, machines, pools, evict):
        app.command(rich_help_panel="Fleet")(command)


def workers(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Filter by job.")] = None,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """List workers and their current activity."""
    with open_client(url, token) as client:
        show_rows(
            client.workers() if job is None else client.job(job).workers(),
            _WORKERS,
            as_json=as_json,
        )


def machines(as_json: Json = False, url: Url = None, token: Token = None) -> None:
    """List machines."""
    with open_client(url, token) as client:
        show_rows(client.machines(), _MACHINES, as_json=as_json)


def pools(as_json: Json = False, url: Url = None, token: Token = None) -> None:
    """List the pools that machines are launched from."""
    with open_client(url, token) as client:
        show_rows(client.pools(), _POOLS, as_json=as_json)


def evict(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Worker name or machine ID.")],
    notice: Annotated[
        float | None,
        typer.Option(min=0, help="Notice in seconds (default: that of the provider)."),
    ] = None,
    kill: Annotated[bool, typer.Option("--kill", help="Kill the machine without notice.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds to wait for the result.")
    ] = RESULT_SECONDS,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Evict a machine, as its cloud provider would.

    Exits with status 1 if the provider refuses, or if the result is not known in time.
    """
    if kill and notice is not None:
        raise typer.BadParameter("--kill gives no notice", param_hint="--notice")
    with open_client(url, token) as client:
        target = {"worker" if "." in name else "machine": name}
        request = client.evict(**target, notice_seconds=notice, kill=kill)
        deadline = time.monotonic() + timeout
        while request.state == "waiting" and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            request = client.request(request.id)
    if as_json:
        show_json(request)
    if request.state == "failed":
        raise FleetError(request.problem or "the request failed", remedy=request.remedy)
    if request.state == "waiting":
        raise FleetError(
            f"the controller has not carried it out within {timeout:.0f} s; whether "
            f"{request.machine} ends is not known",
            remedy="check with vcasgd status that a controller runs, and look at vcasgd machines",
        )
    if not as_json:
        how = "killed" if kill else f"evicted with {duration(notice) or 'the usual'} notice"
        out.print(f"{request.machine} is {how}")
