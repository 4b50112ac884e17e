"""What all our processes do alike: how they log, and how they end."""

from __future__ import annotations

import logging
import os
import sys

from vcasgd.errors import VcasgdError


def configure_logging(role: str, level: str | None = None) -> None:
    """One line per record on standard error, with time, role and process."""
    logging.basicConfig(
        level=level or logging.INFO,
        format=f"%(asctime)s {role}[{os.getpid()}] %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)


def exit_status(error: VcasgdError) -> int:
    """Says the error and returns 1."""
    logging.getLogger("vcasgd").error("%s: %s", type(error).__name__, error)
    return 1
