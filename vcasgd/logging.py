"""Logging for every process, with the job, worker, and request that each record is about.

A request ID follows a request from the API through the job's record to the controller, the
parameter servers, and the workers.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from pythonjsonlogger.json import JsonFormatter

from vcasgd.errors import VcasgdError
from vcasgd.settings import log_format

#: what may stand in a header, a log line and a URL without being quoted
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
#: in this order on a line
FIELDS = ("job", "worker", "request")

_bound: ContextVar[Mapping[str, str]] = ContextVar("correlation", default={})  # noqa: B039 - read only
#: of a process that does one thing in all its threads
_process: dict[str, str] = {}


def identify(**fields: str | None) -> None:
    """What all of this process is done for, from now on."""
    _process.update({name: value for name, value in fields.items() if value})


@contextmanager
def bound(**fields: str | None) -> Iterator[None]:
    """What is done inside, in this thread or task, is done for these."""
    given = {name: value for name, value in fields.items() if value}
    token = _bound.set({**_bound.get(), **given})
    try:
        yield
    finally:
        _bound.reset(token)


def present() -> dict[str, str]:
    """All that is known here, by name."""
    return {**_process, **_bound.get()}


def request_id() -> str | None:
    """Of the request for which something is done."""
    return present().get("request")


class Correlated(logging.Filter):
    """Gives each record the fields that are known where it is made, and never refuses one."""

    def filter(self, record: logging.LogRecord) -> bool:
        for name, value in present().items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


def configure_logging(role: str, level: str | None = None) -> None:
    """One line per record on standard error, with time, role and process, and with the job, the
    worker and the request that it is about; ``VCASGD_LOG_FORMAT`` says how."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Correlated())
    handler.setFormatter(_json(role) if log_format() == "json" else _Plain(role))
    logging.basicConfig(level=level or logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


class _Plain(logging.Formatter):
    """For people: the fields stand behind the message."""

    def __init__(self, role: str) -> None:
        super().__init__(
            f"%(asctime)s {role}[{os.getpid()}] %(levelname)s %(name)s: %(message)s%(about)s"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging names it
        known = [f"{name}={getattr(record, name)}" for name in FIELDS if hasattr(record, name)]
        record.about = f" [{' '.join(known)}]" if known else ""
        return super().formatMessage(record)


def _json(role: str) -> logging.Formatter:
    """For programs: an object on each line."""
    return JsonFormatter(
        "{created}{levelname}{name}{process}{message}",
        style="{",
        rename_fields={"created": "at", "levelname": "level", "name": "logger", "process": "pid"},
        static_fields={"role": role},
    )


def exit_status(error: VcasgdError) -> int:
    """Says the error and returns 1."""
    logging.getLogger("vcasgd").error("%s: %s", type(error).__name__, error)
    return 1
