"""Commands for machines and workers, and a live overview of everything."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from vcasgd.cli.jobs import best_text
from vcasgd.cli.output import (
    Columns,
    Json,
    Token,
    Url,
    ago,
    duration,
    open_client,
    out,
    plain,
    show_json,
    show_rows,
    show_whole,
    size,
    table,
)
from vcasgd.client import Client, may_work_later
from vcasgd.errors import ApiError, FleetError

#: Seconds for the controller's next round, and for the provider's answer.
RESULT_SECONDS = 60.0
#: Seconds between two looks at the result.
POLL_SECONDS = 0.2

_WORKERS: Columns = {
    "WORKER": lambda row: row["name"],
    "MACHINE": lambda row: row.get("machine"),
    "DOING": lambda row: _doing(row),
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
    "USD/H": lambda row: f"{row.get('price_per_hour') or 0:.4f}",
}
_POOLS: Columns = {
    "POOL": lambda row: row["name"],
    "MACHINES": lambda row: row.get("machines"),
    "HARDWARE": lambda row: row.get("kinds") or None,
    "LAUNCHES": lambda row: row.get("launches"),
    "TRUST": lambda row: row.get("trust"),
    "LABELS": lambda row: ", ".join(row.get("labels") or ()) or None,
    "STATE": lambda row: row.get("reason") or "available",
}


def _doing(row: Mapping[str, Any]) -> str | None:
    """Return what a worker does, or why it leaves or gets no work."""
    doing: str | None = row.get("quarantined") or row.get("leaving") or row.get("doing")
    return "asked to leave" if doing == "drain" else doing


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


# -- top ----------------------------------------------------------------------------------------

#: Seconds between two refreshes.
REFRESH_SECONDS = 1.0
#: Rows of each table, so that all tables fit on a screen.
MAX_ROWS = 15

_TOP_JOBS: Columns = {
    "JOB": lambda row: row["id"],
    "STATE": lambda row: row["status"] or row["state"],
    "EPOCH": lambda row: f"{row['progress']['finished_epochs']}/{row['progress']['epochs'] or '?'}",
    "DONE": lambda row: f"{row['progress']['fraction']:.0%}",
    "BEST": lambda row: best_text(row["best"]),
    "MACHINES": lambda row: row["machines"],
    "LOST": lambda row: row["evictions"] + row["kills"],
    "PUSHED": lambda row: size(row["traffic"]["pushed_bytes"]),
    "FETCHED": lambda row: size(row["traffic"]["fetched_bytes"]),
}
_TOP_MACHINES: Columns = {
    "MACHINE": lambda row: row["id"],
    "POOL": lambda row: row["pool"],
    "STATE": lambda row: row["state"],
    "JOB": lambda row: row["job"],
    "LAUNCHED": lambda row: ago(row["launched_at"]),
    "USD/H": _MACHINES["USD/H"],
}
_TOP_SERVERS: Columns = {
    "SERVER": lambda row: row.get("node", "ledger"),
    "MEMORY": lambda row: _memory(row),
    "OPS/S": lambda row: _number(row["operations_per_second"]),
    "QUEUED": lambda row: sum(row["queued"].values()) if "queued" in row else None,
    "SNAPSHOTS/S": lambda row: _number(row.get("publications_per_second")),
}


def top(
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Show a live overview of jobs, machines, costs, and the store until Ctrl-C."""
    with open_client(url, token) as client:
        if as_json:
            show_json(_fetch(client))
        elif once or not out.is_terminal:
            show_whole(picture(_fetch(client)))
        else:
            _watch(client)


def _watch(client: Client) -> None:
    overview = _fetch(client)
    with Live(picture(overview), console=out, auto_refresh=False, screen=True) as live:
        try:
            while True:
                problem = None
                try:
                    overview = _fetch(client)
                except ApiError as error:
                    if not may_work_later(error):
                        raise
                    problem = error.message
                live.update(picture(overview, problem), refresh=True)
                time.sleep(REFRESH_SECONDS)
        except KeyboardInterrupt:
            return


def _fetch(client: Client) -> dict[str, Any]:
    return {
        "jobs": [plain(job) for job in client.jobs("active")],
        "machines": [plain(machine) for machine in client.machines()],
        "pools": [plain(pool) for pool in client.pools()],
        "store": plain(client.store()),
        "spend": plain(client.spend()),
    }


def picture(overview: Mapping[str, Any], problem: str | None = None) -> RenderableType:
    """Return the overview as one screen, with the error of the last refresh in ``problem``."""
    machines = sorted(overview["machines"], key=lambda row: -(row["launched_at"] or 0.0))
    workers = Counter(row["job"] for row in machines)
    jobs = [{**job, "machines": workers[job["id"]]} for job in overview["jobs"][:MAX_ROWS]]
    store, spend = overview["store"], overview["spend"]
    states = Counter(str(row["state"]) for row in machines)
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"
    parts: list[RenderableType] = [
        Text(
            f"machines {counts}   per hour ${spend['usd_per_hour']:.2f}   "
            f"spent ${spend['spent_usd']:.2f}   saved ${spend['saved_usd']:.2f}   "
            f"this month ${spend['month_usd']:.2f}{_of(spend['monthly_budget_usd'])}"
        ),
        Text(),
        table(jobs, _TOP_JOBS) if jobs else Text("no active jobs", style="dim"),
        Text(),
        table(machines[:MAX_ROWS], _TOP_MACHINES) if machines else Text("no machines", style="dim"),
        Text(),
        table([*store["nodes"], store["ledger"]], _TOP_SERVERS),
        *(Text(f"{row['name']}: {row['reason']}") for row in overview["pools"] if row["reason"]),
    ]
    if problem:
        parts.append(Text(f"{problem}; retrying", style="yellow"))
    return Lines(*parts)


def _memory(server: Mapping[str, Any]) -> str:
    used, limit = server["memory_used_bytes"], server["memory_limit_bytes"]
    if used is None:
        return ""
    return f"{used / 1e6:.0f} MB" + (f" of {limit / 1e6:.0f} MB" if limit else "")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}".removesuffix(".0")


def _of(budget: float | None) -> str:
    return "" if budget is None else f" of ${budget:g}"
