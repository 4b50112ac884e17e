"""What people and programs get to see: tables, JSON, and one clear line for each error."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from vcasgd.errors import VcasgdError

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

#: heading → what stands below it, for one row
Columns = Mapping[str, Callable[[Mapping[str, Any]], object]]


class Group(TyperGroup):
    """Commands whose errors of ours end in one line and exit status 1, never in a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except VcasgdError as error:
            show_error(error)
        except OSError as error:
            err.print(f"error: {error.filename or ''}: {error.strerror or error}", markup=False)
        raise typer.Exit(1)


def show_error(error: VcasgdError) -> None:
    """The message, what to do about it, and the traceback of the user's code if there is one."""
    err.print(f"error: {error.message}", markup=False)
    show_traceback(str(error.details.get("traceback") or ""))
    if error.remedy:
        err.print(f"remedy: {error.remedy}", markup=False)


def show_traceback(text: str) -> None:
    if text:
        err.print(text.rstrip(), markup=False)


def show_json(value: object) -> None:
    """On one line, as programs like it."""
    typer.echo(json.dumps(value))


def show_rows(rows: Iterable[Mapping[str, Any]], columns: Columns, *, as_json: bool) -> None:
    """A listing, as a table or as JSON; the table leaves out what the JSON has."""
    rows = list(rows)
    if as_json:
        show_json(rows)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in columns:
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(*(_text(value(row)) for value in columns.values()))
    if out.is_terminal:
        out.print(table)
    else:  # a pipe has no width that could be too small
        Console(width=400, highlight=False).print(table)


def ago(at: float | None) -> str:
    """How long ago, in the largest fitting unit."""
    return "" if at is None else f"{duration(time.time() - at)} ago"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _text(value: object) -> str:
    return "" if value is None else str(value)
