"""SIGINT and SIGTERM handling that interrupts only where the code allows it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class CommandInterrupted(BaseException):
    """Raised for a signal. Like :class:`KeyboardInterrupt`, it is not an :class:`Exception`."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_status(self) -> int:
        """Exit status that a shell reports for a process killed by this signal."""
        return 128 + self.number


class Interrupts:
    """Signal handler that raises :class:`CommandInterrupted` only inside :meth:`allowed`, once.

    Setup and cleanup outside of :meth:`allowed` therefore always run to completion. Use it in
    the main thread.
    """

    def __init__(self) -> None:
        self._caught: int | None = None
        self._allowed = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM until the context ends."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow interruption. Raises :class:`CommandInterrupted` at once for an earlier signal."""
        self._allowed = True
        try:
            if self._caught is not None:
                raise CommandInterrupted(self._caught)
            yield
        finally:
            self._allowed = False

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        first = self._caught is None
        self._caught = number if first else self._caught
        if first and self._allowed:
            raise CommandInterrupted(number)
