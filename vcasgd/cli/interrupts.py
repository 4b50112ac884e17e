"""SIGINT and SIGTERM, only where the work may be interrupted."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class CommandInterrupted(BaseException):
    """A signal came. Like :class:`KeyboardInterrupt` it is no :class:`Exception`."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_status(self) -> int:
        """As a shell has it for a process that a signal ended."""
        return 128 + self.number


class Interrupts:
    """A signal raises :class:`CommandInterrupted` inside :meth:`allowed`, once, and nowhere else.

    So what comes before, such as the creation of what must be cleaned up, and what comes
    after, the cleaning up, is done to its end. Use it in the main thread.
    """

    def __init__(self) -> None:
        self._caught: int | None = None
        self._allowed = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Raises at once if a signal came before."""
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
