"""What the demo does to a job while it runs: one eviction with notice, one kill without."""

from __future__ import annotations

from dataclasses import dataclass

from vcasgd.cli.watch import JobStatus
from vcasgd.client import Client, Row
from vcasgd.errors import ApiError

#: so many machines work before the first fault
WORKERS = 3
#: part of the job after which a fault does not wait any longer for the fleet to be complete
LATEST_EVICTION = 0.35
LATEST_KILL = 0.6


@dataclass
class Faults:
    """Told of each look, it strikes when the time has come: first the eviction, and when that
    machine is gone and replaced, the kill of another."""

    client: Client
    evicted: str | None = None
    killed: str | None = None

    def __call__(self, look: JobStatus) -> None:
        training = [row for row in look.workers if _trains(row)]
        complete, done = len(training) >= WORKERS, look.job.progress.fraction
        if self.evicted is None:
            if training and (complete or done >= LATEST_EVICTION):
                self.evicted = self._strike(training[0], kill=False)
        elif self.killed is None and look.job.evictions:
            others = [row for row in training if row["instance"] != self.evicted]
            if others and (complete or done >= LATEST_KILL):
                self.killed = self._strike(others[0], kill=True)

    def _strike(self, worker: Row, *, kill: bool) -> str | None:
        """The machine that is taken; ``None`` if it was faster."""
        try:
            return str(self.client.evict(worker["name"], kill=kill)["instance"])
        except ApiError:
            return None


def _trains(row: Row) -> bool:
    return bool(row.get("steps")) and not row.get("notice") and not row.get("leaving")
