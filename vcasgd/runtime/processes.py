"""What all our processes do alike: how they log, and how they end."""

from __future__ import annotations

import ctypes
import logging
import os
import sys

from pythonjsonlogger.json import JsonFormatter

from vcasgd.correlation import FIELDS, Correlated
from vcasgd.errors import VcasgdError
from vcasgd.settings import log_format

#: of <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


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


def keep_freed_memory() -> None:
    """Large blocks that are freed stay with the process, where its C library is glibc.

    By default each tensor of more than 32 MiB is given back to the system when it is freed, and
    the next one has to be zeroed and mapped page by page again. A worker frees and needs the
    same sizes all the time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def exit_status(error: VcasgdError) -> int:
    """Says the error and returns 1."""
    logging.getLogger("vcasgd").error("%s: %s", type(error).__name__, error)
    return 1
