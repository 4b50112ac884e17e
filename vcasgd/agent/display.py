"""Output of an agent for people: lines for events, and the present state below them."""

from __future__ import annotations

import time
from datetime import datetime

from rich.console import Console
from rich.filesize import decimal
from rich.status import Status
from rich.text import Text

from vcasgd.schemas.joining import OrderView

#: Seconds between two lines about the progress if the output is no terminal.
LINE_SECONDS = 60.0


class Display:
    """Prints to standard error. Without a terminal, the state is a line from time to time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = console.status("") if console.is_terminal else None
        self._printed_at = float("-inf")

    def event(self, text: str) -> None:
        """Print a line."""
        self._console.print(f"{datetime.now().astimezone():%H:%M:%S} {_one_line(text)}")

    def state(self, text: str) -> None:
        """Show the present state."""
        if self._status is not None:
            self._status.start()
            self._status.update(Text(_one_line(text)))
        elif time.monotonic() - self._printed_at >= LINE_SECONDS:
            self._printed_at = time.monotonic()
            self.event(text)

    def close(self) -> None:
        """Remove the state."""
        if self._status is not None:
            self._status.stop()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def describe(orders: list[OrderView], sent: int, received: int) -> str:
    """Return the state of a machine's workers in one line."""
    if not orders:
        return "waiting for a job"
    parts = []
    for order in orders:
        progress = "" if order.progress is None else f" {order.progress:.0%}"
        samples = "" if not order.samples else f", {order.samples:,} samples here"
        parts.append(f"{order.name}{progress}{samples}, {order.doing or 'starting'}")
    return f"{'; '.join(parts)} (sent {decimal(sent)}, received {decimal(received)})"
