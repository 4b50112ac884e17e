"""What a worker counts, in a file that is mapped into its memory and into that of an observer.

It has a fixed size and is touched as a whole at its creation, so that counting for hours does
not show as growing memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

#: delays that are remembered; the oldest give way
DELAYS = 1 << 16
#: cells before the ring of delays: vectors fetched, updates applied, bytes at the start
_HEAD = 3


class Tally:
    """One process writes, any others look."""

    #: bytes of the file
    SIZE = 8 * (_HEAD + DELAYS)

    def __init__(self, path: Path, *, create: bool = False) -> None:
        mode: Literal["w+", "r+"] = "w+" if create else "r+"
        self._cells = np.memmap(path, np.float64, mode, shape=(_HEAD + DELAYS,))
        if create:
            self._cells[:] = 0.0

    @property
    def fetched(self) -> float:
        """Vectors that the worker fetched; a shard of one is a part of one."""
        return float(self._cells[0])

    @property
    def applied(self) -> int:
        """Updates of the worker that it knows to be applied, each shard's for itself."""
        return int(self._cells[1])

    @property
    def baseline(self) -> int:
        """Resident bytes of the worker before it had a job; 0 as long as it does not know."""
        return int(self._cells[2])

    def note_baseline(self, resident: int) -> None:
        self._cells[2] = resident

    def note_fetched(self, vectors: float) -> None:
        self._cells[0] += vectors

    def note_applied(self, seconds: float) -> None:
        """``seconds`` from the submission of an update to the news that it is applied."""
        self._cells[_HEAD + self.applied % DELAYS] = seconds
        self._cells[1] += 1

    def delays(self, since: int) -> NDArray[np.float64]:
        """Seconds [n] of the updates after the first ``since``, as far as they are remembered."""
        applied = self.applied
        numbers = np.arange(max(since, applied - DELAYS), applied)
        return np.asarray(self._cells[_HEAD + numbers % DELAYS])
