"""What all our processes do alike: how they log, and how they end."""

from __future__ import annotations

import ctypes
import logging
import os
import sys

from vcasgd.errors import VcasgdError

#: of <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def configure_logging(role: str, level: str | None = None) -> None:
    """One line per record on standard error, with time, role and process."""
    logging.basicConfig(
        level=level or logging.INFO,
        format=f"%(asctime)s {role}[{os.getpid()}] %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)


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
