"""For whom something is done: which job, worker and request. Log lines and events carry it.

One id leads from a request to the API through the job's record to the controller, the parameter
servers and the workers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

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
