"""What a page that is open wants to be told: small pieces of the whole, and which of them changed.

All readers of one process share a look, so that many open pages cost the ledger little more than
one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vcasgd.api.rows import finite
from vcasgd.api.services import Services
from vcasgd.errors import JobUnreadable, NotFound
from vcasgd.store.ledger.job import JobRecord

#: a look is as good as new for so long
FRESH_SECONDS = 0.4
#: beside those that are active: a page shows how they ended
NEWEST_JOBS = 20

#: type of a message and what it is of → its data
Pieces = dict[tuple[str, str], dict[str, Any]]


@dataclass(frozen=True)
class OverviewState:
    """``jobs``: whose events are told, too; ``at``: before which all of them are in it, in ms of
    the ledger's clock."""

    pieces: Pieces
    jobs: tuple[str, ...]
    at: int


class Overview:
    """The platform at a glance. May be asked by threads."""

    def __init__(self, here: Services, clock: Callable[[], float] = time.monotonic) -> None:
        self._here = here
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._look = OverviewState({}, (), 0)

    def look(self) -> OverviewState:
        """Raises :class:`~vcasgd.errors.StoreUnavailable`."""
        with self._lock:
            if self._clock() - self._looked_at >= FRESH_SECONDS:
                self._look = self._new_look()
                self._looked_at = self._clock()
            return self._look

    def _new_look(self) -> OverviewState:
        # before the names: what happens to a job that is not among them is told at the next look
        jobs, at = self._here.jobs, self._here.everything.now()
        names = dict.fromkeys((*jobs.active(), *jobs.newest(NEWEST_JOBS)))
        pieces: Pieces = {("fleet", ""): self._fleet(), ("store", ""): self._store()}
        for name in names:
            try:
                pieces["job", name] = self._job(jobs.get(name))
            except (JobUnreadable, NotFound):
                continue
        return OverviewState(
            {key: finite(piece) for key, piece in pieces.items()}, tuple(names), at
        )

    def _job(self, job: JobRecord) -> dict[str, Any]:
        accuracy = job.evaluations[-1].metrics.get("accuracy") if job.evaluations else None
        expected = job.facts.samples * job.spec.epochs if job.facts else 0
        applied = int(job.totals.get("applied", 0))
        return {
            "id": job.id,
            "state": job.state.value,
            "finished_epochs": job.finished_epochs,
            "fraction": min(1.0, applied / expected) if expected else 0.0,
            "version": job.version,
            "updates": job.totals.get("updates", 0),
            "accuracy": accuracy,
            "workers": 0 if job.state.over else self._here.jobs.worker_count(job.id),
            "evictions": job.evictions,
            "kills": job.kills,
            "spent_usd": self._here.costs.spent(job.id),
        }

    def _fleet(self) -> dict[str, Any]:
        control = self._here.control
        machines, pools = control.instances(), control.pools()
        return {
            "controller": control.held(),
            "machines": {name: _brief(row) for name, row in machines.items()},
            "blocked": {name: row["reason"] for name, row in pools.items() if row.get("reason")},
            "usd_per_hour": sum(row.get("price_per_hour") or 0.0 for row in machines.values()),
        }

    def _store(self) -> dict[str, Any]:
        beats = self._here.servers.all()
        names = ("versions", "queued", "unreplicated")
        return {
            "nodes": {
                node: {name: beat.get(name) or {} for name in names} for node, beat in beats.items()
            }
        }


def _brief(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row.get(name) for name in ("pool", "state", "joined", "job")}


def changed(before: Pieces, after: Pieces) -> Pieces:
    """What is new or different."""
    return {key: piece for key, piece in after.items() if before.get(key) != piece}
