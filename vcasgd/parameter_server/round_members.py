"""Decides when a round ends: once all workers that are expected have pushed, or after a moment.

Pure: times are seconds of any clock, which the caller passes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

#: Least seconds for which a round waits for a worker after its first update. A worker that is
#: this late was interrupted, not slow.
LEAST_GRACE = 0.25
#: Most seconds, so that one lost machine never holds up the others for long.
MOST_GRACE = 30.0


@dataclass
class RoundMembers:
    """Workers that pushed in the last round are expected in the present one.

    A round waits for them as long as its slowest worker so far took to train its update, from the
    first update on: a worker on time arrives well before that, and a lost one costs no more than
    one interval, or less if its loss becomes known. It isn't expected again until it pushes.
    """

    _expected: frozenset[str] = frozenset()
    _arrived: set[str] = field(default_factory=set)
    _began: float = 0.0
    _grace: float = LEAST_GRACE

    def arrive(self, worker: str, interval_seconds: float, now: float) -> None:
        """Record a worker's update, which it trained for ``interval_seconds``."""
        if not self._arrived:
            self._began, self._grace = now, LEAST_GRACE
        self._arrived.add(worker)
        self._grace = min(max(self._grace, interval_seconds), MOST_GRACE)

    @property
    def deadline(self) -> float | None:
        """When the round ends at the latest; None before its first update."""
        return self._began + self._grace if self._arrived else None

    def complete(self, now: float) -> bool:
        """Return True if nobody is missing, or the missing ones are too late."""
        deadline = self.deadline
        if deadline is None or now >= deadline:
            return True
        return bool(self._expected) and self._expected <= self._arrived

    def lose(self, workers: Collection[str]) -> None:
        """Don't wait for workers that are known to be lost. One that pushes is expected again."""
        self._expected -= frozenset(workers)

    def end(self) -> None:
        """Start the next round, which expects those that arrived in this one."""
        if self._arrived:
            self._expected, self._arrived = frozenset(self._arrived), set()
