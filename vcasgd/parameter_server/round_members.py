"""Decides when a round ends: once all workers that are expected have pushed, or after a moment.

Pure: times are seconds of any clock, which the caller passes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

#: Least seconds for which a round waits for a worker after its first update. A worker that is
#: this late was interrupted, not slow.
MIN_GRACE = 0.25
#: Intervals for which it waits. After an update that just missed the last round, the others arrive
#: an interval later. Without a reserve, each half of the workers would miss the other's rounds.
GRACE_INTERVALS = 1.25
#: Most seconds, so that one lost machine never holds up the others for long.
MAX_GRACE = 30.0


@dataclass
class RoundMembers:
    """Workers that pushed in the last round are expected in the present one.

    A round waits for them somewhat longer than its slowest worker so far took to train its update,
    from the first update on: a worker on time arrives before that, and a lost one costs little more
    than one interval, or less if its loss becomes known. It isn't expected again until it pushes.
    """

    _expected: frozenset[str] = frozenset()
    _arrived: set[str] = field(default_factory=set)
    _began: float = 0.0
    _grace: float = MIN_GRACE

    def arrive(self, worker: str, interval_seconds: float, now: float) -> None:
        """Record a worker's update, which it trained for ``interval_seconds``."""
        if not self._arrived:
            self._began, self._grace = now, MIN_GRACE
        self._arrived.add(worker)
        self._grace = min(max(self._grace, GRACE_INTERVALS * interval_seconds), MAX_GRACE)

    @property
    def deadline(self) -> float | None:
        """When the round ends at the latest; None before its first update."""
        return self._began + self._grace if self._arrived else None

    def waiting_seconds(self, now: float) -> float:
        """Return for how long the round has waited for missing workers."""
        return now - self._began if self._arrived and not self.complete(now) else 0.0

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
