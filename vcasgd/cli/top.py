"""``vcasgd top``: a live overview of jobs, machines, costs and the store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vcasgd.cli.connection import Token, Url, open_client
from vcasgd.cli.output import Json, ago, out, percent, show_json, size
from vcasgd.client import Client, may_work_later
from vcasgd.errors import ApiError
from vcasgd.schemas.costs import SpendView
from vcasgd.schemas.fleet import MachineRow, PoolRow, ServerGaugesView, StoreView
from vcasgd.schemas.jobs import JobView

#: Seconds between two refreshes.
REFRESH_SECONDS = 1.0
#: Rows of each table, so that all tables fit on a screen.
MAX_ROWS = 15


@dataclass(frozen=True)
class FleetOverview:
    """State of the fleet at one moment."""

    jobs: Sequence[JobView]
    machines: list[MachineRow]
    pools: list[PoolRow]
    store: StoreView
    spend: SpendView


def top(
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Show a live overview of jobs, machines, costs and the store until Ctrl-C."""
    with open_client(url, token) as client:
        if as_json:
            show_json(vars(_fetch(client)))
        elif once or not out.is_terminal:
            out.print(picture(_fetch(client)))
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


def _fetch(client: Client) -> FleetOverview:
    jobs = [job for job in client.jobs(limit=MAX_ROWS * 2) if not job.over]
    return FleetOverview(jobs, client.machines(), client.pools(), client.store(), client.spend())


def picture(overview: FleetOverview, problem: str | None = None) -> RenderableType:
    """Return the overview as one screen, with the error of the last refresh in ``problem``."""
    parts: list[RenderableType] = [
        _head(overview), Text(), _jobs(overview), Text(), _machines(overview), Text(),
        _store(overview.store),
    ]  # fmt: skip
    blocked = [row for row in overview.pools if row.reason]
    if blocked:
        parts += [Text(), *(Text(f"{row.name}: {row.reason}") for row in blocked)]
    if problem:
        parts += [Text(), Text(f"{problem}; retrying", style="yellow")]
    return Lines(*parts)


def _head(overview: FleetOverview) -> RenderableType:
    states = Counter(str(row.state) for row in overview.machines)
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"
    spend = overview.spend
    return Text.assemble(
        ("machines ", "dim"), counts, ("   per hour ", "dim"), f"${spend.usd_per_hour:.2f}",
        ("   spent ", "dim"), f"${spend.spent_usd:.2f}",
        ("   saved ", "dim"), (f"${spend.saved_usd:.2f}", "green"),
    )  # fmt: skip


def _jobs(overview: FleetOverview) -> RenderableType:
    table = _table("JOB", "STATE", "EPOCH", "DONE", "EVALUATED", "ACCURACY",
                   "MACHINES", "LOST", "PUSHED", "FETCHED")  # fmt: skip
    workers = Counter(row.job for row in overview.machines)
    for job in overview.jobs[:MAX_ROWS]:
        progress = job.progress
        table.add_row(
            job.id, job.state, f"{progress.finished_epochs}/{progress.epochs_text}",
            f"{progress.fraction:.0%}", _evaluated(job), percent(job.best_accuracy),
            str(workers[job.id]), str(job.evictions + job.kills), size(job.traffic.pushed_bytes),
            size(job.traffic.fetched_bytes),
        )  # fmt: skip
    return table if overview.jobs else Text("no active jobs", style="dim")


def _evaluated(job: JobView) -> str:
    """Return the epoch of the newest evaluation."""
    return f"{job.evaluations[-1].epoch:.2f}".removesuffix(".00") if job.evaluations else ""


def _machines(overview: FleetOverview) -> RenderableType:
    table = _table("MACHINE", "POOL", "STATE", "JOB", "LAUNCHED", "USD/H")
    rows = sorted(overview.machines, key=lambda row: row.launched_at or 0.0, reverse=True)
    for row in rows[:MAX_ROWS]:
        leaving = row.state == "leaving"
        table.add_row(
            row.id, row.pool, row.state, row.job or "",
            ago(row.launched_at), f"{row.price_per_hour or 0:.4f}",
            style="yellow" if leaving else None,
        )  # fmt: skip
    return table if rows else Text("no machines", style="dim")


def _store(store: StoreView) -> RenderableType:
    table = _table("SERVER", "MEMORY", "OPS/S", "QUEUED", "VERSIONS/S")
    for node in store.nodes:
        queued, rate = str(sum(node.queued.values())), _number(node.publications_per_second)
        table.add_row(node.node, _memory(node), _number(node.operations_per_second), queued, rate)
    ledger = store.ledger
    table.add_row("ledger", _memory(ledger), _number(ledger.operations_per_second), "", "")
    return table


def _memory(server: ServerGaugesView) -> str:
    used, limit = server.memory_used_bytes, server.memory_limit_bytes
    if used is None:
        return ""
    return f"{used / 1e6:.0f} MB" + (f" of {limit / 1e6:.0f} MB" if limit else "")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}".removesuffix(".0")


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table
