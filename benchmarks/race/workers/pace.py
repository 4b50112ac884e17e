"""Pace of the race, the same for every contender."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SLOW_FACTOR = 4.0
#: File in a run's folder with the name of the machine that is slower.
SLOW_FILE = "slow"
#: File in a run's folder with the Unix time at which the first machine began to train.
BEGAN_FILE = "began"


class Pace:
    """Makes a step last as long as on a machine of its own, although machines share processors.

    A step of ``samples`` takes ``seconds`` for each sample, on the slow machine more.
    """

    def __init__(self, seconds: float, folder: Path, machine: str) -> None:
        self._seconds, self._slow, self._machine = seconds, folder / SLOW_FILE, machine
        self._began: Path | None = folder / BEGAN_FILE

    @contextmanager
    def step(self, samples: int) -> Iterator[None]:
        """Wrap what a machine computes in a step, without the exchange of updates."""
        start = time.monotonic()
        yield
        self.rest(start, samples)

    def rest(self, start: float, samples: int) -> None:
        """Sleep for the rest of a step that began at ``start`` of the monotonic clock."""
        self._begin(time.time() - (time.monotonic() - start))
        end = start + samples * self._seconds * self._factor()
        time.sleep(max(0.0, end - time.monotonic()))

    def _begin(self, at: float) -> None:
        """Write the time of this machine's first step, unless another one was first."""
        if self._began is not None:
            with suppress(FileExistsError), self._began.open("x") as file:
                file.write(str(at))
            self._began = None

    def _factor(self) -> float:
        try:
            return SLOW_FACTOR if self._slow.read_text() == self._machine else 1.0
        except OSError:
            return 1.0
