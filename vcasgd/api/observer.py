"""State of the platform in small pieces, for the stream of changes.

All readers of one process share each observation, so many open pages cost the ledger little more
than one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from vcasgd.api.convert import fraction
from vcasgd.logging import isolated
from vcasgd.schemas.base import finite
from vcasgd.schemas.stream import FleetBrief, JobBrief, MachineBrief, NodeBrief, StoreBrief
from vcasgd.store.ledger.costs import Costs
from vcasgd.store.ledger.events import EventFeed
from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.servers import Control, Servers

#: Seconds for which all readers share an observation.
FRESH_SECONDS = 0.4
#: Newest jobs that are observed beside the active ones, because a page shows how they ended.
NEWEST_JOBS = 20

#: Pieces of the state, by type and name.
Pieces = dict[tuple[str, str], JobBrief | FleetBrief | StoreBrief]


@dataclass(frozen=True)
class PlatformState:
    """An observation of the platform."""

    pieces: Pieces
    #: Jobs whose events the stream contains.
    jobs: tuple[str, ...]
    #: Time of the observation, in ms of the ledger's clock; it contains all earlier events.
    at: int


class PlatformObserver:
    """Observer of the platform that threads may share."""

    def __init__(
        self,
        jobs: Jobs,
        control: Control,
        servers: Servers,
        costs: Costs,
        feed: EventFeed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs = jobs
        self._control = control
        self._servers = servers
        self._costs = costs
        self._feed = feed
        self._clock = clock
        self._lock = threading.Lock()
        self._observed_at = float("-inf")
        self._state = PlatformState({}, (), 0)

    def observe(self) -> PlatformState:
        """Return the current state. Raises :class:`~vcasgd.errors.StoreUnavailable`."""
        with self._lock:
            if self._clock() - self._observed_at >= FRESH_SECONDS:
                self._state = self._observe()
                self._observed_at = self._clock()
            return self._state

    def _observe(self) -> PlatformState:
        # read the clock first: the next observation then covers jobs that are submitted meanwhile
        at = self._feed.now()
        names = dict.fromkeys((*self._jobs.active(), *self._jobs.newest(NEWEST_JOBS)))
        pieces: Pieces = {("fleet", ""): self._fleet(), ("store", ""): self._store()}
        for name in names:
            with isolated(name):
                pieces["job", name] = self._job(self._jobs.get(name))
        return PlatformState(pieces, tuple(names), at)

    def _job(self, job: JobRecord) -> JobBrief:
        accuracy = job.evaluations[-1].metrics.get("accuracy") if job.evaluations else None
        return JobBrief(
            id=job.id,
            state=job.state,
            finished_epochs=job.finished_epochs,
            fraction=fraction(job),
            version=job.version,
            updates=job.totals.get("updates", 0),
            accuracy=finite(accuracy),
            workers=0 if job.state.over else self._jobs.worker_count(job.id),
            evictions=job.evictions,
            kills=job.kills,
            spent_usd=self._costs.spent(job.id),
        )

    def _fleet(self) -> FleetBrief:
        machines, pools = self._control.instances(), self._control.pools()
        return FleetBrief(
            controller=self._control.held(),
            machines={name: MachineBrief.model_validate(row) for name, row in machines.items()},
            blocked={name: row["reason"] for name, row in pools.items() if row.get("reason")},
            usd_per_hour=sum(row.get("price_per_hour") or 0.0 for row in machines.values()),
        )

    def _store(self) -> StoreBrief:
        heartbeats = self._servers.all()
        names = ("versions", "queued", "unreplicated")
        nodes = {
            node: NodeBrief.model_validate({name: row.get(name) or {} for name in names})
            for node, row in heartbeats.items()
        }
        return StoreBrief(nodes=nodes)


def changed(before: Pieces, after: Pieces) -> Pieces:
    """Return the pieces of ``after`` that are new or different."""
    return {key: piece for key, piece in after.items() if before.get(key) != piece}
