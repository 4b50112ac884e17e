"""Log lines of a worker."""

from __future__ import annotations

import time
from collections.abc import Iterable

from vcasgd.store.ledger.events import NewLine
from vcasgd.store.ledger.untrusted import LogLevel


def printed(texts: Iterable[str], level: LogLevel = "out") -> list[NewLine]:
    """Return lines that a worker printed just now."""
    return [NewLine(time.time(), level, text) for text in texts]
