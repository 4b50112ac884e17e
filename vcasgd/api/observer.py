"""State of the platform in small pieces, for the stream of changes and the overview.

All readers of one process share each observation, and its encoded changes, so many open pages cost
the ledger no more than one, and the process little more.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vcasgd.api.changes import Changes, SharedEvent, StateChange, encoded, packed
from vcasgd.api.convert import job_brief
from vcasgd.logging import isolated
from vcasgd.schemas.base import finite
from vcasgd.schemas.fleet import MachineRow
from vcasgd.schemas.stream import FleetBrief, JobBrief, MachinesBrief, NodeBrief, StoreBrief
from vcasgd.store.connection import RedisClient
from vcasgd.store.gauges import read_gauges
from vcasgd.store.ledger.costs import Costs
from vcasgd.store.ledger.events import LARGEST_NUMBER, LAST_JOB, EventCursor, EventFeed
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.servers import Control, Servers

#: Seconds for which all readers share an observation.
FRESH_SECONDS = 0.4
#: Newest jobs that are observed beside the active ones, because a page shows how they ended.
NEWEST_JOBS = 20
#: Seconds after a job's end in which its costs may change.
LATE_SECONDS = 600.0

#: Events of one observation; after more, each reader reads its own.
MAX_SHARED_EVENTS = 1000
#: Seconds after which a gap between two observations is not read, as nobody followed.
MAX_GAP_SECONDS = 5.0
#: Machines in one message.
MACHINES_AT_ONCE = 200

#: Parts of the state, by type and name. A part is the same object until it changes.
StateParts = dict[tuple[str, str], JobBrief | FleetBrief | StoreBrief]
#: Machines by name, each the same object until it changes.
Machines = dict[str, MachineRow]


@dataclass(frozen=True)
class PlatformState:
    """An observation of the platform."""

    pieces: StateParts
    machines: Machines
    #: Jobs whose events the stream contains.
    jobs: tuple[str, ...]
    #: Time of the observation, in ms of the ledger's clock; it contains all earlier events.
    at: int
    #: Number of the last change.
    version: int = 0

    def opening(self) -> tuple[bytes, ...]:
        """Return the whole state as messages, in blocks."""
        cursor = EventCursor(self.at)
        return packed([*_machines(cursor, self.machines, (), True), *_parts(cursor, self.pieces)])


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
        self._state = PlatformState({}, {}, (), 0)
        self._opening: tuple[int, tuple[bytes, ...]] = (-1, ())
        #: What the ledger has about each machine.
        self._texts: dict[str, bytes] = {}
        #: Jobs that ended so long ago that they no longer change.
        self._ended: dict[str, JobBrief] = {}
        self.changes = Changes()

    def observe(self) -> PlatformState:
        """Return the current state. Raises :class:`~vcasgd.errors.StoreUnavailable`."""
        with self._lock:
            if self._clock() - self._observed_at >= FRESH_SECONDS:
                self._state = self._observe(self._state)
                self._observed_at = self._clock()
            return self._state

    def opening(self) -> tuple[PlatformState, tuple[bytes, ...]]:
        """Return the current state, and the messages that start a stream with it.

        Readers share the messages. Raises :class:`~vcasgd.errors.StoreUnavailable`.
        """
        state = self.observe()
        with self._lock:
            if self._opening[0] != state.at:
                self._opening = state.at, state.opening()
            return state, self._opening[1]

    def overview(self, most: int) -> list[JobBrief]:
        """Return the active jobs and the ``most`` newest ones, newest first.

        Jobs that ended long ago are read once. Raises :class:`~vcasgd.errors.StoreUnavailable`.
        """
        state, newest = self.observe(), self._jobs.newest(most)
        names = tuple(dict.fromkeys((*newest, *self._jobs.active()[::-1])))
        known = {name: brief for (_, name), brief in state.pieces.items() if name}
        with self._lock:
            known |= self._ended
        missing = self._briefs([name for name in names if name not in known])
        settled = time.time() - LATE_SECONDS
        old = {name: each for name, each in missing.items() if (each.ended_at or settled) < settled}
        with self._lock:
            self._ended = {
                name: each for name, each in (self._ended | old).items() if name in names
            }
        found: Mapping[str, Any] = known | missing
        return [found[name] for name in names if name in found]

    # -- one observation -----------------------------------------------------------------------

    def _observe(self, before: PlatformState) -> PlatformState:
        # read the clock first: the next observation then covers jobs that are submitted meanwhile
        at = self._feed.now()
        names = tuple(dict.fromkeys((*self._jobs.active(), *self._jobs.newest(NEWEST_JOBS))))
        machines = self._machines(before.machines)
        values: StateParts = {("fleet", ""): self._fleet(machines), ("store", ""): self._store()}
        values |= {("job", name): brief for name, brief in self._briefs(names).items()}
        pieces = {
            key: old if (old := before.pieces.get(key)) == value else value
            for key, value in values.items()
        }
        # a job that has ended may be missing from this observation, but not its last events
        events = self._events(before, (*{*before.jobs, *names},), at)
        state = PlatformState(pieces, machines, names, at, before.version)
        messages = self._messages(before, state)
        if messages or events is None or events:
            state = replace(state, version=before.version + 1)
            change = StateChange(state.version, EventCursor(before.at), tuple(messages), events)
            self.changes.add(change)
        return state

    def _messages(self, before: PlatformState, state: PlatformState) -> list[bytes]:
        """Return what changed, as messages."""
        cursor = EventCursor(before.at)
        parts = {
            key: part for key, part in state.pieces.items() if before.pieces.get(key) is not part
        }
        machines = {
            name: row
            for name, row in state.machines.items()
            if before.machines.get(name) is not row
        }
        removed = [name for name in before.machines if name not in state.machines]
        changed = bool(machines or removed)
        return [
            *(_machines(cursor, machines, removed, False) if changed else ()),
            *_parts(cursor, parts),
        ]

    def _events(
        self, before: PlatformState, jobs: tuple[str, ...], at: int
    ) -> tuple[SharedEvent, ...] | None:
        """Return the events since the last observation; None if each reader has to read its own."""
        if at - before.at > MAX_GAP_SECONDS * 1000:
            return None
        # an event of the millisecond before.at is not in the earlier observation
        start = EventCursor(before.at - 1, LARGEST_NUMBER, LAST_JOB)
        new = self._feed.events(jobs, start, at, limit=MAX_SHARED_EVENTS)
        if len(new) >= MAX_SHARED_EVENTS:
            return None
        return tuple(event_message(cursor, event) for cursor, event in new)

    def _briefs(self, names: Collection[str]) -> dict[str, JobBrief]:
        workers, costs = self._jobs.workers.counts(names), self._costs.of_all(names)
        amounts, briefs = dict(zip(names, costs, strict=True)), {}
        for name, job in self._jobs.get_many(names).items():
            with isolated(name):
                briefs[name] = job_brief(job, workers[name], amounts[name])
        return briefs

    def _machines(self, before: Machines) -> Machines:
        """Return all machines; only those whose text in the ledger changed are parsed."""
        texts = self._control.machine_texts()
        machines = {
            name: before[name]
            if self._texts.get(name) == text and name in before
            else MachineRow.model_validate({**json.loads(text), "id": name})
            for name, text in sorted(texts.items())
        }
        self._texts = texts
        return machines

    def _fleet(self, machines: Machines) -> FleetBrief:
        pools, rows = self._control.pools(), machines.values()
        return FleetBrief(
            controller=self._control.held(),
            machines=len(machines),
            joined=sum(bool(row.joined) for row in rows),
            blocked={name: row["reason"] for name, row in pools.items() if row.get("reason")},
            usd_per_hour=sum(row.price_per_hour or 0.0 for row in rows),
        )

    def _store(self) -> StoreBrief:
        heartbeats = self._servers.all()
        names = ("versions", "queued", "unreplicated")
        nodes = {
            node: NodeBrief.model_validate({name: row.get(name) or {} for name in names})
            for node, row in heartbeats.items()
        }
        return StoreBrief(nodes=nodes, ledger_full=read_gauges(self._ledger).full)


def event_message(cursor: EventCursor, event: Mapping[str, Any]) -> SharedEvent:
    """Return an event with its position and its message."""
    return cursor, encoded("event", cursor, json.dumps(finite(event)))


def _parts(cursor: EventCursor, parts: StateParts) -> Iterable[bytes]:
    for (kind, _), part in parts.items():
        yield encoded(kind, cursor, part.model_dump_json())


def _machines(
    cursor: EventCursor, machines: Machines, removed: Collection[str], whole: bool
) -> list[bytes]:
    """Return messages about machines, each of a bounded number of them."""
    rows, gone = list(machines.values()), list(removed)
    messages = []
    for first in range(0, max(len(rows), len(gone), 1), MACHINES_AT_ONCE):
        part = slice(first, first + MACHINES_AT_ONCE)
        brief = MachinesBrief(whole=whole and first == 0, changed=rows[part], removed=gone[part])
        messages.append(encoded("machines", cursor, brief.model_dump_json()))
    return messages
