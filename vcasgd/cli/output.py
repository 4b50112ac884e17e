"""Options that commands share, and output for people and programs: tables, JSON, and errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Annotated, Any

import typer
from pydantic import BaseModel
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType
from rich.filesize import decimal
from rich.segment import Segment
from rich.text import Text
from typer.core import TyperGroup

from vcasgd.client import Client
from vcasgd.client.transport import find_api
from vcasgd.errors import VcasgdError
from vcasgd.printable import printable
from vcasgd.settings import Settings, load_settings
from vcasgd.spec.problems import plain_problem


class PlainConsole(Console):
    """Console that prints text as it is: no markup, no highlighting, no control characters.

    Styles and layout come from the code that prints only.
    """

    def __init__(
        self, *, stderr: bool = False, width: int | None = None, file: IO[str] | None = None
    ) -> None:
        super().__init__(
            stderr=stderr, width=width, file=file,
            markup=False, highlight=False, emoji=False, soft_wrap=True,
        )  # fmt: skip

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render an object to segments, with printable text."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


#: Characters of a line that no terminal has.
MAX_LINE = 100_000
#: Exit status after Ctrl-C; a shell reports the same for SIGINT.
INTERRUPTED = 130

out = PlainConsole()
err = PlainConsole(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Url = Annotated[
    str | None,
    typer.Option("--url", help="API URL (default: $VCASGD_API_URL, then the local stack)."),
]
Token = Annotated[
    str | None,
    typer.Option("--token", help="API token. Prefer $VCASGD_TOKEN, which ps does not show."),
]

JobName = Annotated[
    str,
    typer.Argument(metavar="JOB", help="Job ID, or its start, or the name of only one job."),
]

#: Column heading → function that returns the cell for a row.
Columns = Mapping[str, Callable[[Mapping[str, Any]], object]]


#: Types in help texts that read better otherwise: the range itself stands beside its type.
_TYPES = {"<bool>": "", "<list[str]>": "", "<int range>": "<int>", "<float range>": "<float>"}


class Group(TyperGroup):
    """Command group that prints vcasgd errors on one line and exits with status 1."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _with_plain_types(super().get_params(ctx), ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _with_plain_types(command.get_params(ctx), ctx)
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = plain_problem(error.message)
            raise
        except VcasgdError as error:
            show_error(error)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "torch":
                raise
            err.print("error: this needs torch, and it is not installed")
            err.print("remedy: pip install 'vcasgd[worker]'")
        except OSError as error:
            name = f"{error.filename}: " if error.filename else ""
            err.print(f"error: {name}{error.strerror or error}")
        raise typer.Exit(1)


def _with_plain_types(parameters: list[Any], ctx: Any) -> list[Any]:
    for each in parameters:
        shown = getattr(each, "display_type_rich", None)  # older versions of typer have none
        if shown is not None and (name := shown(ctx=ctx)) in _TYPES:
            each.display_type_rich = lambda text=_TYPES[name], **_: text
    return parameters


def open_client(url: str | None, token: str | None, settings: Settings | None = None) -> Client:
    """Return a client for the API that the options, the environment or the local stack name.

    Raises the errors of :func:`~vcasgd.client.transport.find_api`.
    """
    return Client(*find_api(url, token, settings or load_settings()))


def show_error(error: VcasgdError) -> None:
    """Print an error's message, its remedy, and the traceback of the user's code, if any."""
    err.print(f"error: {error.message}")
    show_traceback(str(error.details.get("traceback") or ""))
    if error.remedy:
        err.print(f"remedy: {error.remedy}")


def show_traceback(text: str) -> None:
    if text:
        err.print(text.rstrip())


def show_json(value: object) -> None:
    """Print a value as one line of JSON. It may contain models."""
    typer.echo(json.dumps(value, default=plain))


def plain(model: BaseModel) -> dict[str, Any]:
    """Return a model as JSON values."""
    return model.model_dump(mode="json")


def show_facts(facts: Iterable[tuple[str, object]], width: int) -> None:
    """Print one ``name value`` line for each fact that has a value; names are padded."""
    for name, value in facts:
        if value not in (None, ""):
            out.print(f"{name:<{width}}{value}")


def show_rows(
    rows: Iterable[Mapping[str, Any] | BaseModel], columns: Columns, *, as_json: bool
) -> None:
    """Print rows as a table with the given columns, or as JSON with all fields."""
    dicts = [plain(row) if isinstance(row, BaseModel) else row for row in rows]
    if as_json:
        show_json(dicts)
    else:
        show_whole(table(dicts, columns))


def show_whole(tables: RenderableType) -> None:
    """Print tables on lines of any length, which a terminal wraps."""
    PlainConsole(width=MAX_LINE).print(tables, soft_wrap=False)


def table(rows: Sequence[Mapping[str, Any]], columns: Columns) -> Text:
    """Return rows as a table with the given columns, without those that are empty.

    Rich's own tables drop columns beside a long text, and fill their lines up.
    """
    cells = {heading: [_cell(value(row)) for row in rows] for heading, value in columns.items()}
    shown = [[name, *column] for name, column in cells.items() if any(column) or not rows]
    widths = [max(map(cell_len, column)) for column in shown]
    lines = [
        "  ".join(map(set_cell_size, row, widths)).rstrip() for row in zip(*shown, strict=True)
    ]
    result = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
    result.stylize("bold", 0, len(lines[0]))
    return result


def _cell(value: object) -> str:
    return "" if value is None else " ".join(printable(str(value)).splitlines())


def ago(at: float | None) -> str:
    """Return the time since ``at`` (Unix seconds) as text, such as ``5 m ago``."""
    return "" if at is None else f"{duration(time.time() - at)} ago"


def until(at: float | None) -> str:
    """Return the time up to ``at`` (Unix seconds) as text, such as ``in 5 m``."""
    return "" if at is None else f"in {duration(at - time.time())}"


def duration(seconds: float | None) -> str:
    """Return a duration in the largest unit that fits, such as ``3 h``."""
    if seconds is None:
        return ""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def size(count: float | None) -> str:
    """Return a number of bytes as text, such as ``1.2 GB``."""
    return "" if count is None else decimal(int(count))
