"""The fleet at a glance, drawn anew again and again."""

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
from vcasgd.cli.output import Json, ago, out, percent, show_json
from vcasgd.client import Client, JobView, Row
from vcasgd.client.problems import may_work_later
from vcasgd.errors import ApiError

#: between two looks
LOOK_SECONDS = 1.0
#: of jobs and of machines that fit on a screen
MOST_ROWS = 15


@dataclass(frozen=True)
class Glance:
    """The fleet at one moment."""

    jobs: Sequence[JobView]
    machines: list[Row]
    pools: list[Row]
    store: Row
    spend: Row

    def to_dict(self) -> Row:
        return {**vars(self), "jobs": [job.to_dict() for job in self.jobs]}


def top(
    once: Annotated[bool, typer.Option("--once", help="Look once, and leave.")] = False,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Jobs, machines, money and the store at a glance, until Ctrl-C."""
    with open_client(url, token) as client:
        if as_json:
            show_json(_glance(client).to_dict())
        elif once or not out.is_terminal:
            out.print(picture(_glance(client)))
        else:
            _watch(client)


def _watch(client: Client) -> None:
    found = _glance(client)
    with Live(picture(found), console=out, auto_refresh=False, screen=True) as live:
        try:
            while True:
                trouble = None
                try:
                    found = _glance(client)
                except ApiError as error:
                    if not may_work_later(error):
                        raise
                    trouble = error.message
                live.update(picture(found, trouble), refresh=True)
                time.sleep(LOOK_SECONDS)
        except KeyboardInterrupt:
            return


def _glance(client: Client) -> Glance:
    jobs = [job for job in client.jobs(limit=MOST_ROWS * 2) if not job.over]
    return Glance(jobs, client.instances(), client.pools(), client.store(), client.spend())


def picture(found: Glance, trouble: str | None = None) -> RenderableType:
    """Everything on one screen; ``trouble``: why it shows nothing new."""
    parts: list[RenderableType] = [
        _head(found), Text(), _jobs(found), Text(), _machines(found), Text(), _store(found.store),
    ]  # fmt: skip
    blocked = [row for row in found.pools if row.get("reason")]
    if blocked:
        parts += [Text(), *(Text(f"{row['name']}: {row['reason']}") for row in blocked)]
    if trouble:
        parts += [Text(), Text(f"{trouble}; trying again", style="yellow")]
    return Lines(*parts)


def _head(found: Glance) -> RenderableType:
    states = Counter(str(row.get("state")) for row in found.machines)
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"
    spend = found.spend
    return Text.assemble(
        ("machines ", "dim"), counts, ("   an hour ", "dim"), f"${spend['usd_per_hour']:.2f}",
        ("   spent ", "dim"), f"${spend['spent_usd']:.2f}",
        ("   saved ", "dim"), (f"${spend['saved_usd']:.2f}", "green"),
    )  # fmt: skip


def _jobs(found: Glance) -> RenderableType:
    table = _table("JOB", "STATE", "EPOCH", "DONE", "ACCURACY", "MACHINES", "LOST")
    at_work = Counter(row.get("job") for row in found.machines)
    for job in found.jobs[:MOST_ROWS]:
        progress = job.progress
        table.add_row(
            job.id, job.state, f"{progress.finished_epochs}/{progress.epochs}",
            f"{progress.fraction:.0%}", percent(job.best_accuracy), str(at_work[job.id]),
            str(job.evictions + job.kills),
        )  # fmt: skip
    return table if found.jobs else Text("no job is active", style="dim")


def _machines(found: Glance) -> RenderableType:
    table = _table("INSTANCE", "POOL", "STATE", "JOB", "LAUNCHED", "USD/H")
    rows = sorted(found.machines, key=lambda row: row.get("launched_at") or 0.0, reverse=True)
    for row in rows[:MOST_ROWS]:
        leaving = row.get("state") == "leaving"
        table.add_row(
            row["id"], row.get("pool"), row.get("state"), row.get("job") or "",
            ago(row.get("launched_at")), f"{row.get('price_per_hour') or 0:.4f}",
            style="yellow" if leaving else None,
        )  # fmt: skip
    return table if rows else Text("there are no machines", style="dim")


def _store(store: Row) -> RenderableType:
    table = _table("SERVER", "MEMORY", "OPS/S", "QUEUED", "VERSIONS/S")
    for name, row in (
        *((node["node"], node) for node in store["nodes"]), ("ledger", store["ledger"]),
    ):  # fmt: skip
        used, limit = row.get("memory_used_bytes"), row.get("memory_limit_bytes")
        memory = "" if used is None else f"{used / 1e6:.0f} MB"
        waiting, rate = row.get("queued"), row.get("publications_per_second")
        table.add_row(
            name, f"{memory} of {limit / 1e6:.0f} MB" if limit and memory else memory,
            _number(row.get("operations_per_second")),
            "" if waiting is None else str(sum(waiting.values())), _number(rate),
        )  # fmt: skip
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}".removesuffix(".0")


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table
