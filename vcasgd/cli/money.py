"""Commands about money, and the question before it is spent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from vcasgd.cli.connection import Token, Url, open_client
from vcasgd.cli.jobfile import load_job
from vcasgd.cli.output import Columns, Json, duration, err, out, show_json, show_rows
from vcasgd.client import Client
from vcasgd.errors import Conflict, SpecError
from vcasgd.spec.job import JobSpec

#: its machines cost nobody anything
FREE_POOL = "local"

_OFFERS: Columns = {
    "POOL": lambda row: row["pool"],
    "ZONE": lambda row: row["zone"],
    "TYPE": lambda row: row["instance_type"],
    "KIND": lambda row: "spot" if row["spot"] else "on-demand",
    "USD/H": lambda row: f"{row['price_per_hour']:.4f}",
    "SAMPLES/S": lambda row: _optional(row["samples_per_second"], ".1f"),
    "USD/M SAMPLES": lambda row: _optional(row["usd_per_million_samples"], ".4f"),
    "MACHINES": lambda row: row["machines"] or None,
    "EXCLUDED": lambda row: row["excluded"],
}
_POOLS: Columns = {
    "POOL": lambda row: row["pool"],
    "KIND": lambda row: "spot" if row["spot"] else "on-demand",
    "MACHINE HOURS": lambda row: f"{row['seconds'] / 3600:.2f}",
    "USD": lambda row: f"{row['usd']:.4f}",
    "ON DEMAND": lambda row: f"{row['on_demand_usd']:.4f}",
}

Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a field; may be repeated."),
]


def register(app: typer.Typer) -> None:
    for command in (plan, cost):
        app.command(rich_help_panel="Money")(command)


def plan(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The job file.")],
    samples: Annotated[
        int | None, typer.Option(min=1, help="Of an epoch; else as an earlier job had.")
    ] = None,
    samples_per_second: Annotated[
        float | None, typer.Option(min=0, help="Of one machine; else as measured before.")
    ] = None,
    changes: Changes = None,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """What a job would buy now, how long it would take and what it would cost. Buys nothing."""
    spec = load_job(file, changes or ())
    with open_client(url, token) as client:
        found = client.plan(spec, samples=samples, samples_per_second=samples_per_second)
    if as_json:
        show_json(found)
        return
    show_rows(found["offers"], _OFFERS, as_json=False)
    for line in _lines(found):
        out.print(line, markup=False)


def cost(
    job: Annotated[str, typer.Argument(metavar="JOB", help="As submit and jobs show it.")],
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """What a job has cost so far, what that would be on demand, and what was wasted."""
    with open_client(url, token) as client:
        found = client.cost(job)
    if as_json:
        show_json(found)
        return
    show_rows(found["pools"], _POOLS, as_json=False)
    spent, risk_free = found["spent_usd"], found["on_demand_usd"]
    budget = found["max_cost_usd"]
    saved = f" ({found['saved_usd'] / risk_free:.0%})" if risk_free else ""
    facts = {
        "spent": f"{spent:.4f} USD" + (f" of {budget:g}" if budget is not None else ""),
        "on demand": f"{risk_free:.4f} USD",
        "saved": f"{found['saved_usd']:.4f} USD{saved}",
        "booting": _waste(found["wasted"]["booting"]),
        "idle": _waste(found["wasted"]["idle"]),
        "lost work": _waste(found["wasted"]["lost_work"]),
    }
    for name, value in facts.items():
        out.print(f"{name:<12}{value}", markup=False)


def confirm(client: Client, spec: JobSpec) -> None:
    """Shows what the job would cost, and asks, where it would cost anything.

    Raises :class:`SpecError` where there is nobody to ask, and :class:`typer.Abort`.
    """
    try:
        found = client.plan(spec)
    except Conflict as error:
        if set(spec.workers.pools) <= {FREE_POOL}:
            return
        raise SpecError(
            f"what the job costs is not known: {error.message}",
            remedy="try again, or submit it with --yes",
            field="workers.pools",
        ) from error
    if not found["costs_money"]:
        return
    for line in _lines(found):
        err.print(line, markup=False)
    if not stdin_is_a_terminal():
        raise SpecError(
            "the job costs money, and there is nobody to ask",
            remedy="look at it with vcasgd plan, then submit it with --yes",
            field="yes",
        )
    typer.confirm("Submit it?", abort=True, err=True)


def stdin_is_a_terminal() -> bool:
    return sys.stdin.isatty()


def _lines(found: dict[str, Any]) -> list[str]:
    """For people, below the table of offers."""
    lines = [
        f"{each['pool']} falls out: {'; '.join(each['reasons'])}"
        for each in found["pools"]
        if not each["usable"]
    ]
    lines.append(
        f"{found['machines']} machines for {found['usd_per_hour']:.4f} USD/h "
        f"({found['on_demand_usd_per_hour']:.4f} on demand)"
    )
    if found["hours"] is not None:
        lines.append(
            f"about {duration(found['hours'] * 3600)} and {found['cost_usd']:.2f} USD "
            f"({found['on_demand_cost_usd']:.2f} on demand)"
        )
    lines += [f"assumed: {each}" for each in found["assumptions"]]
    return lines + [f"remedy: {each}" for each in found["remedies"]]


def _waste(waste: dict[str, float]) -> str:
    return f"{waste['usd']:.4f} USD, {duration(waste['seconds'])}"


def _optional(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)
