"""Logging for every process, with the job, worker, and request that each record is about.

A request ID is passed from the API through the job's record to the controller, the parameter
servers, and the workers.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO

from pythonjsonlogger.json import JsonFormatter

from vcasgd.errors import (
    ClusterError,
    JobUnreadable,
    NotFound,
    StoreDenied,
    StoreFull,
    StoreUnavailable,
    VcasgdError,
)
from vcasgd.printable import masked, printable
from vcasgd.settings import log_format

#: Valid request IDs; they need no quoting in a header, a log line, or a URL.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
#: Bytes that :func:`last_lines` reads at most.
TAIL_BYTES = 16_000
#: Fields of a record, in the order of a log line.
FIELDS = ("job", "worker", "request")

_bound: ContextVar[Mapping[str, str]] = ContextVar("correlation", default={})  # noqa: B039 - read only
#: Fields of the whole process.
_process: dict[str, str] = {}


def identify(**fields: str | None) -> None:
    """Add fields to all further records of this process."""
    _process.update({name: value for name, value in fields.items() if value})


@contextmanager
def bound(**fields: str | None) -> Iterator[None]:
    """Add fields to records inside the context, in this thread or task."""
    values = {name: value for name, value in fields.items() if value}
    token = _bound.set({**_bound.get(), **values})
    try:
        yield
    finally:
        _bound.reset(token)


#: Errors that concern all jobs: a server or Ray does not work.
_OUTAGES = (StoreUnavailable, StoreDenied, StoreFull, ClusterError)


@contextmanager
def isolated(job: str, request: str | None = None) -> Iterator[None]:
    """Guard work for one job, so that whatever is wrong with it doesn't stop the others.

    Logs all errors but outages, which it raises.
    """
    with bound(job=job, request=request):
        try:
            yield
        except _OUTAGES:
            raise
        except (JobUnreadable, NotFound) as error:
            logging.getLogger("vcasgd").warning("%s: %s", job, error)
        except Exception:
            logging.getLogger("vcasgd").exception("%s", job)


def current_fields() -> dict[str, str]:
    """Return the current fields."""
    return {**_process, **_bound.get()}


def request_id() -> str | None:
    """Return the ID of the current request."""
    return current_fields().get("request")


class Correlated(logging.Filter):
    """Filter that adds the current fields to each record and accepts all."""

    def filter(self, record: logging.LogRecord) -> bool:
        for name, value in current_fields().items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


def configure_logging(role: str, level: str | None = None) -> None:
    """Log one line per record to standard error, in the format ``VCASGD_LOG_FORMAT``.

    A line has the time, the role, and the process, and the job, worker, and request of the record.
    """
    handler = _SafeHandler(sys.stderr)
    handler.addFilter(Correlated())
    handler.setFormatter(_json_formatter(role) if log_format() == "json" else _TextFormatter(role))
    logging.basicConfig(level=level or logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


class _SafeHandler(logging.StreamHandler[TextIO]):
    """Handler that shows no hidden values (:mod:`vcasgd.printable`), and only printable text.

    Lines after the first of a record are indented, so that text of a worker can't pass for another
    record.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable(masked(super().format(record))).replace("\n", "\n  ")


def is_own(handler: logging.Handler) -> bool:
    """Return True for the handler of :func:`configure_logging`."""
    return isinstance(handler, _SafeHandler)


class _TextFormatter(logging.Formatter):
    """Formatter for people: the fields follow the message."""

    def __init__(self, role: str) -> None:
        super().__init__(
            f"%(asctime)s {role}[{os.getpid()}] %(levelname)s %(name)s: %(message)s%(about)s"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging names it
        fields = [f"{name}={getattr(record, name)}" for name in FIELDS if hasattr(record, name)]
        record.about = f" [{' '.join(fields)}]" if fields else ""
        return super().formatMessage(record)


def _json_formatter(role: str) -> logging.Formatter:
    """Return a formatter for programs: one JSON object per line."""
    return JsonFormatter(
        "{created}{levelname}{name}{process}{message}",
        style="{",
        rename_fields={"created": "at", "levelname": "level", "name": "logger", "process": "pid"},
        static_fields={"role": role},
    )


def exit_status(error: VcasgdError) -> int:
    """Log the error and return 1."""
    logging.getLogger("vcasgd").error("%s: %s", type(error).__name__, error)
    return 1


def last_lines(path: Path, lines: int) -> list[str]:
    """Return the last lines of a file, of its last 16 kB; none if it doesn't exist."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-lines:]
