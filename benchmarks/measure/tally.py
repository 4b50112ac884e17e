"""Counters of a worker in a file that the worker and the benchmark map into memory.

The file has a fixed size and is written completely at its creation, so that counting for hours
does not show as growing memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

#: Capacity of the ring of delays; new delays replace the oldest.
DELAYS = 1 << 16
#: Cells before the ring of delays: vectors fetched, updates applied, baseline bytes.
_HEAD = 3


class Tally:
    """Shared counters with one writer and any number of readers."""

    #: Size of the file in bytes.
    SIZE = 8 * (_HEAD + DELAYS)

    def __init__(self, path: Path, *, create: bool = False) -> None:
        mode: Literal["w+", "r+"] = "w+" if create else "r+"
        self._cells = np.memmap(path, np.float64, mode, shape=(_HEAD + DELAYS,))
        if create:
            self._cells[:] = 0.0

    @property
    def fetched(self) -> float:
        """Number of vectors that the worker fetched; a shard counts as a fraction."""
        return float(self._cells[0])

    @property
    def applied(self) -> int:
        """Number of updates that the worker knows to be applied; each shard counts."""
        return int(self._cells[1])

    @property
    def baseline(self) -> int:
        """Resident bytes of the worker before the job started; 0 until they are known."""
        return int(self._cells[2])

    def note_baseline(self, resident: int) -> None:
        self._cells[2] = resident

    def note_fetched(self, vectors: float) -> None:
        self._cells[0] += vectors

    def note_applied(self, seconds: float) -> None:
        """Count an update; ``seconds`` is the time from its push until the worker knew."""
        self._cells[_HEAD + self.applied % DELAYS] = seconds
        self._cells[1] += 1

    def delays(self, since: int) -> NDArray[np.float64]:
        """Return the delays in seconds, float64 [n], of the updates after the first ``since``.

        Delays that the ring no longer holds are missing.
        """
        applied = self.applied
        numbers = np.arange(max(since, applied - DELAYS), applied)
        return np.asarray(self._cells[_HEAD + numbers % DELAYS])
