"""Processes whose wall clock a test can set, as an administrator or NTP does."""

from __future__ import annotations

import time
from pathlib import Path

from support.harness import RedisServer
from support.missing import skip_here
from support.waiting import await_truth
from vcasgd.chaos.faults import Clocks
from vcasgd.errors import StackError

#: Seconds of difference that are less than any step of a test.
_STEP = 60


class SteppingClock:
    """The wall clock of programs that are started with ``env``.

    Skips the test without a C compiler, but not in CI.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._clocks = Clocks(directory)
        except StackError as error:
            skip_here(str(error))
        self.env = self._clocks.env

    def set(self, seconds: int) -> None:
        """Set the clock to so many seconds after the true time."""
        self._clocks.set_all(seconds)

    def suspend(self, seconds: int) -> None:
        """Change the clocks as if the machine had been suspended for so many seconds."""
        self._clocks.set_all(seconds, suspended=seconds)


class SteppingServer(RedisServer):
    """A server with a wall clock of its own."""

    def __init__(self, directory: Path, *, durable: bool) -> None:
        self._clock = SteppingClock(directory / "clock")
        super().__init__(directory, durable=durable, env=self._clock.env, more=("databases 2",))

    def set_clock(self, seconds: int) -> None:
        """Set the clock to so many seconds after the true time, and wait until it shows that.

        A server looks at its clock only now and then.
        """
        self._clock.set(seconds)
        await_truth(lambda: abs(self.connection.time()[0] - time.time() - seconds) < _STEP)
