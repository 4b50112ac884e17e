"""Cost commands, and the confirmation before a job costs money."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from vcasgd.cli.jobfile import load_job, show_warnings
from vcasgd.cli.output import (
    Columns,
    JobName,
    Json,
    Token,
    Url,
    duration,
    err,
    open_client,
    out,
    show_facts,
    show_json,
    show_rows,
    until,
)
from vcasgd.client import Client
from vcasgd.errors import Conflict, SpecError
from vcasgd.fleet.pools import LOCAL_POOL
from vcasgd.schemas.costs import DeadlineEstimate, PlanView, WasteView
from vcasgd.spec.job import JobSpec
from vcasgd.spec.values import parse_duration, parse_moment

_OFFERS: Columns = {
    "POOL": lambda row: row["pool"],
    "ZONE": lambda row: row["zone"],
    "TYPE": lambda row: row["machine_type"],
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
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Override a field of the job file. Repeatable."
    ),
]


def checked(parse: Callable[[object], object]) -> Callable[[str], str]:
    """Return the parser of an option, whose text has to be what ``parse`` takes."""

    def text_of(text: str) -> str:
        try:
            parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return text

    return text_of


Within = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION",
        parser=checked(parse_duration),
        help="Deadline from now, such as 12h.",
    ),
]
FinishBy = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", parser=checked(parse_moment), help="Deadline, such as 2026-12-01T08:00."
    ),
]


def deadline_changes(within: str | None, finish_by: str | None) -> list[str]:
    """Return the changes of a job file that the options for the deadline mean."""
    if within is None and finish_by is None:
        return []
    return [f"within={within or 'null'}", f"finish_by={finish_by or 'null'}"]


def plan(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="Job file, or its folder.")],
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Samples per epoch (default: from earlier runs)."),
    ] = None,
    samples_per_second: Annotated[
        float | None,
        typer.Option(min=0, help="Speed of one machine (default: from earlier runs)."),
    ] = None,
    parameters: Annotated[
        int | None,
        typer.Option(min=1, help="Parameters of the model, for the traffic between zones."),
    ] = None,
    within: Within = None,
    finish_by: FinishBy = None,
    changes: Changes = None,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Show the machines a job would buy now, its duration and its cost. Buys nothing."""
    spec = load_job(file, [*(changes or ()), *deadline_changes(within, finish_by)])
    show_warnings(spec)
    with open_client(url, token) as client:
        offer = client.plan(
            spec, samples=samples, samples_per_second=samples_per_second, parameters=parameters
        )
    if as_json:
        show_json(offer)
        return
    show_rows(offer.offers, _OFFERS, as_json=False)
    for line in _lines(offer):
        out.print(line)


def cost(
    job: JobName,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Show a job's cost so far, its on-demand equivalent, and the waste."""
    with open_client(url, token) as client:
        costs = client.job(job).cost()
    if as_json:
        show_json(costs)
        return
    show_rows(costs.pools, _POOLS, as_json=False)
    on_demand, budget = costs.on_demand_usd, costs.max_cost_usd
    limit = f" of {budget:g}" if budget is not None else ""
    share = f" ({costs.saved_usd / on_demand:.0%})" if on_demand else ""
    facts = {
        "spent": f"{costs.spent_usd:.4f} USD{limit}",
        "on demand": f"{on_demand:.4f} USD",
        "saved": f"{costs.saved_usd:.4f} USD{share}",
        "booting": _waste(costs.wasted.booting),
        "idle": _waste(costs.wasted.idle),
        "lost work": _waste(costs.wasted.lost_work),
    }
    show_facts(facts.items(), width=12)


def confirm(client: Client, spec: JobSpec, jobs: int = 1) -> None:
    """Show the plan of a job that costs money, and ask whether to submit so many ``jobs``.

    Of another job, show only how sure its deadline is, if it has one. Raises :class:`SpecError` if
    the costs are unknown or the input is not a terminal, and :class:`typer.Abort` if the user
    declines.
    """
    pools = set(spec.workers.pools or ())
    # Its machines cost nothing, and no other pool may have its name.
    free = bool(pools) and pools <= {LOCAL_POOL}
    if free and spec.deadline(0.0) is None:
        return
    try:
        plan = client.plan(spec)
    except Conflict as error:
        if free:
            return
        raise SpecError(
            f"the cost of the job is unknown: {error.message}",
            remedy="try again, or submit it with --yes",
            field="workers.pools",
        ) from error
    if not plan.costs_money:
        if plan.deadline is not None:
            err.print(_deadline(plan.deadline))
        return
    for line in _lines(plan):
        err.print(line)
    if not stdin_is_a_terminal():
        raise SpecError(
            "the job costs money, and stdin is not a terminal to confirm it",
            remedy="check it with vcasgd plan, then submit it with --yes",
            field="yes",
        )
    if jobs > 1:
        err.print(f"this is the plan of the first of {jobs} jobs")
    typer.confirm("Submit it?" if jobs == 1 else f"Submit {jobs} jobs?", abort=True, err=True)


def stdin_is_a_terminal() -> bool:
    return sys.stdin.isatty()


def _lines(plan: PlanView) -> list[str]:
    """Return the text below the table of offers."""
    lines = [
        f"pool {pool.pool} excluded: {'; '.join(pool.reasons)}"
        for pool in plan.pools
        if not pool.usable
    ]
    lines.append(
        f"{plan.machines} machine{'s'[: plan.machines != 1]} for {plan.usd_per_hour:.4f} USD/h "
        f"({plan.on_demand_usd_per_hour:.4f} on demand)"
    )
    if plan.hours is not None:
        lines.append(
            f"about {duration(plan.hours * 3600)} and {plan.cost_usd:.2f} USD "
            f"({plan.on_demand_cost_usd:.2f} on demand)"
        )
    if plan.deadline is not None:
        lines.append(_deadline(plan.deadline))
    lines += [f"assumed: {assumption}" for assumption in plan.assumptions]
    lines += [f"remedy: {remedy}" for remedy in plan.remedies]
    if plan.hours is None and plan.machines:
        lines.append("vcasgd plan takes these numbers with --samples and --samples-per-second")
    return lines


def _deadline(deadline: DeadlineEstimate) -> str:
    return f"deadline {until(deadline.at)}: {deadline.text}"


def _waste(waste: WasteView) -> str:
    return f"{waste.usd:.4f} USD, {duration(waste.seconds)}"


def _optional(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)
