"""State of the platform in small pieces, for the stream of changes.

All readers of one process share each observation, so many open pages cost the ledger little more
than one.
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from vcasgd.api.convert import fraction
from vcasgd.logging import isolated
from vcasgd.schemas.base import finite
from vcasgd.schemas.stream import FleetBrief, JobBrief, MachineBrief, NodeBrief, StoreBrief
from vcasgd.store.connection import RedisClient
from vcasgd.store.gauges import read_gauges
from vcasgd.store.ledger.costs import Costs
from vcasgd.store.ledger.events import LARGEST_NUMBER, LAST_JOB, EventCursor, EventFeed
from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.servers import Control, Servers

#: Seconds for which all readers share an observation.
FRESH_SECONDS = 0.4
#: Newest jobs that are observed beside the active ones, because a page shows how they ended.
NEWEST_JOBS = 20

#: Events of one observation that are kept for all readers; after more, each reads its own.
MOST_SHARED_EVENTS = 1000
#: Seconds of events that are kept: a reader that follows is never further behind.
SHARED_SECONDS = 10.0
#: Seconds after which a gap between two observations is not read, as nobody followed.
LONGEST_GAP_SECONDS = 5.0


@dataclass(frozen=True)
class StatePart:
    """Part of the state. It is the same object in all observations until it changes.

    ``text`` is its JSON, which all readers share.
    """

    value: JobBrief | FleetBrief | StoreBrief
    text: str


#: Parts of the state, by type and name.
StateParts = dict[tuple[str, str], StatePart]
#: An event with its position and its JSON.
SharedEvent = tuple[EventCursor, str]


@dataclass(frozen=True)
class PlatformState:
    """An observation of the platform."""

    pieces: StateParts
    #: Jobs whose events the stream contains.
    jobs: tuple[str, ...]
    #: Time of the observation, in ms of the ledger's clock; it contains all earlier events.
    at: int
    #: All events from ``since`` (ms) on and before ``at``, in order.
    events: tuple[SharedEvent, ...] = ()
    since: int = 0

    def events_after(self, cursor: EventCursor) -> tuple[SharedEvent, ...] | None:
        """Return the events after a position; None if they are no longer kept."""
        if cursor.ms < self.since:
            return None
        first = bisect_right(self.events, cursor, key=lambda event: event[0])
        return self.events[first:]


class PlatformObserver:
    """Observer of the platform that threads may share."""

    def __init__(
        self,
        jobs: Jobs,
        control: Control,
        servers: Servers,
        costs: Costs,
        feed: EventFeed,
        ledger: RedisClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs = jobs
        self._control = control
        self._servers = servers
        self._costs = costs
        self._feed = feed
        self._ledger = ledger
        self._clock = clock
        self._lock = threading.Lock()
        self._observed_at = float("-inf")
        self._state = PlatformState({}, (), 0)

    def observe(self) -> PlatformState:
        """Return the current state. Raises :class:`~vcasgd.errors.StoreUnavailable`."""
        with self._lock:
            if self._clock() - self._observed_at >= FRESH_SECONDS:
                self._state = self._observe(self._state)
                self._observed_at = self._clock()
            return self._state

    def fresh(self) -> PlatformState | None:
        """Return the current state if it is known without asking the ledger. Never blocks."""
        is_fresh = self._clock() - self._observed_at < FRESH_SECONDS
        return self._state if is_fresh else None

    def _observe(self, before: PlatformState) -> PlatformState:
        # read the clock first: the next observation then covers jobs that are submitted meanwhile
        at = self._feed.now()
        names = tuple(dict.fromkeys((*self._jobs.active(), *self._jobs.newest(NEWEST_JOBS))))
        values: dict[tuple[str, str], JobBrief | FleetBrief | StoreBrief]
        values = {("fleet", ""): self._fleet(), ("store", ""): self._store()}
        workers, costs = self._jobs.worker_counts(names), self._costs.spent_of(names)
        for name, job in self._jobs.get_many(names).items():
            with isolated(name):
                values["job", name] = self._job(job, workers[name], costs[name])
        pieces = {
            key: old if (old := before.pieces.get(key)) and old.value == value else _part(value)
            for key, value in values.items()
        }
        # a job that has ended may be missing from this observation, but not its last events
        events, since = self._events(before, (*{*before.jobs, *names},), at)
        return PlatformState(pieces, names, at, events, since)

    def _events(
        self, before: PlatformState, jobs: tuple[str, ...], at: int
    ) -> tuple[tuple[SharedEvent, ...], int]:
        """Return the kept events before ``at`` (ms), and the time from which they are complete."""
        if at - before.at > LONGEST_GAP_SECONDS * 1000:
            return (), at
        # an event of the millisecond before.at is not in the earlier observation
        start = EventCursor(before.at - 1, LARGEST_NUMBER, LAST_JOB)
        new = self._feed.events(jobs, start, at, limit=MOST_SHARED_EVENTS)
        if len(new) >= MOST_SHARED_EVENTS:
            return (), at
        since = max(before.since, at - int(SHARED_SECONDS * 1000))
        kept = [each for each in before.events if each[0].ms >= since]
        return (*kept, *((cursor, json.dumps(finite(event))) for cursor, event in new)), since

    def _job(self, job: JobRecord, workers: int, spent_usd: float) -> JobBrief:
        accuracy = job.evaluations[-1].metrics.get("accuracy") if job.evaluations else None
        return JobBrief(
            id=job.id,
            state=job.state,
            finished_epochs=job.finished_epochs,
            fraction=fraction(job),
            version=job.version,
            updates=job.totals.get("updates", 0),
            accuracy=finite(accuracy),
            workers=0 if job.state.over else workers,
            evictions=job.evictions,
            kills=job.kills,
            spent_usd=spent_usd,
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
        return StoreBrief(nodes=nodes, ledger_full=read_gauges(self._ledger).full)


def _part(value: JobBrief | FleetBrief | StoreBrief) -> StatePart:
    return StatePart(value, value.model_dump_json())


def changed(before: StateParts, after: StateParts) -> StateParts:
    """Return the pieces of ``after`` that are new or different."""
    return {key: piece for key, piece in after.items() if before.get(key) is not piece}
