"""The state of the platform, which one task observes for all readers of the event stream.

So many open pages cost the ledger no more than one. A reader has no queue: it keeps the state that
it sent last, and sends what is different in the newest one. A slow reader skips states, not events.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from bisect import bisect_right
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import anyio
from anyio import CapacityLimiter, to_thread
from sse_starlette import ServerSentEvent

from vcasgd.api.convert import job_brief
from vcasgd.api.history import StillValid
from vcasgd.errors import VcasgdError
from vcasgd.logging import isolated
from vcasgd.schemas.base import finite
from vcasgd.schemas.fleet import FleetBrief, JobBrief, Machine, NodeBrief, StoreBrief
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.costs import Costs
from vcasgd.store.ledger.events import LARGEST_NUMBER, LAST_JOB, EventCursor, EventFeed
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.servers import Servers
from vcasgd.store.quotas import read_gauges

log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Seconds between two observations of the platform; people can't read faster.
OBSERVE_SECONDS = 0.5
#: Seconds for which it is observed after the last reader has gone.
LINGER_SECONDS = 5.0
#: Seconds between two checks of a reader's token, if nothing changes.
CHECK_SECONDS = 1.0
#: Newest jobs that are observed beside the active ones, because a page shows how they ended.
NEWEST_JOBS = 20
#: Jobs deleted last that each state names; a command deletes fewer between two states.
DELETED_JOBS = 100
#: Newest events that all readers share, and those that a reader further behind reads at a time.
MAX_SHARED_EVENTS, MAX_EVENTS = 1000, 200
#: Machines in one message.
MACHINES_AT_ONCE = 200
#: Bytes of whole messages that are sent at once, unless one message is longer. It bounds what a
#: reader that does not read occupies.
BLOCK_BYTES = 1 << 16


class MachineText(NamedTuple):
    """A machine as the ledger has it, parsed, and as JSON for the stream."""

    source: bytes
    row: Machine
    text: str


class SharedEvent(NamedTuple):
    """An event with its position, as JSON."""

    cursor: EventCursor
    text: str


@dataclass(frozen=True)
class PlatformState:
    """An observation of the platform."""

    #: Jobs, sums of machines, and servers as JSON, by type and name.
    parts: Mapping[tuple[str, str], str]
    machines: Mapping[str, MachineText]
    #: Jobs whose events the stream contains.
    jobs: tuple[str, ...]
    #: Time of the observation, in ms of the ledger's clock; it contains all earlier events.
    at: int = field(compare=False)
    #: The newest events before that time; all of them after ``events_since``.
    events: tuple[SharedEvent, ...]
    events_since: EventCursor = field(compare=False)

    def messages(self, before: PlatformState | None, cursor: EventCursor) -> Iterator[bytes]:
        """Yield what is different from an earlier state, or all, with a position."""
        for text in _machine_texts(before.machines if before else None, self.machines):
            yield _encoded("machines", cursor, text)
        for key, text in self.parts.items():
            if before is None or before.parts.get(key) != text:
                yield _encoded(key[0], cursor, text)


class Platform:
    """The newest state of the platform. It is observed only while there are readers."""

    def __init__(self, ledger: RedisClient) -> None:
        self._jobs, self._costs = Jobs(ledger), Costs(ledger)
        self._control, self._servers = Control(ledger), Servers(ledger)
        self._feed, self._ledger = EventFeed(ledger), ledger
        self._readers = 0
        self._used_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._wake = anyio.Event()
        self._state: PlatformState | None = None
        self._error: Exception | None = None
        self._threads = CapacityLimiter(8)

    async def follow(
        self,
        state: PlatformState,
        cursor: EventCursor,
        valid: StillValid,
    ) -> AsyncGenerator[bytes, None]:
        """Yield a state, then its changes, and all events after a position, in blocks.

        Ends once ``valid`` returns False: the reader's token was revoked. Raises
        :class:`~vcasgd.errors.StoreUnavailable`.
        """
        before: PlatformState | None = None
        self._readers += 1
        try:
            while True:
                # The position of a state's message is before its events, so no event is skipped.
                for block in packed(state.messages(before, cursor)):
                    yield block
                async for block in self._events(cursor, state):
                    yield block
                cursor = max(cursor, EventCursor(state.at))
                before, newer = state, None
                while newer is None:
                    with anyio.move_on_after(CHECK_SECONDS):
                        newer = await self.newest(before)
                    if not await valid():
                        return
                state = newer
        finally:
            self._readers -= 1
            self._used_at = time.monotonic()

    def overview(self, most: int) -> list[JobBrief]:
        """Return the active jobs and the ``most`` newest ones, newest first.

        Raises :class:`~vcasgd.errors.StoreUnavailable`.
        """
        names = dict.fromkeys((*self._jobs.newest(most), *self._jobs.active()[::-1]))
        return list(self._briefs(list(names)).values())

    async def _events(self, cursor: EventCursor, state: PlatformState) -> AsyncIterator[bytes]:
        """Yield the events after a position and before a state, in blocks."""
        while cursor < state.events_since:
            read = partial(self._read, state.jobs, cursor, state.at, MAX_EVENTS)
            events = [_shared(*event) for event in await self._in_thread(read)]
            if events:
                yield b"".join(_encoded("event", *event) for event in events)
            if len(events) < MAX_EVENTS:
                return
            cursor = events[-1].cursor
        first = bisect_right(state.events, cursor, key=lambda event: event.cursor)
        for block in packed(_encoded("event", *event) for event in state.events[first:]):
            yield block

    def _read(
        self, jobs: Collection[str], after: EventCursor, until: int, most: int
    ) -> list[tuple[EventCursor, dict[str, Any]]]:
        """Return the events of ``jobs``, and of those that have ended since, between two times."""
        known = {*jobs, *self._jobs.active_since(after.ms / 1000)}
        return self._feed.events(known, after, until, limit=most)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._threads)

    # -- the task ------------------------------------------------------------------------------

    async def newest(self, before: PlatformState | None = None) -> PlatformState:
        """Return the newest state once it differs from ``before``.

        Raises :class:`~vcasgd.errors.StoreUnavailable`.
        """
        self._used_at = time.monotonic()
        if self._task is None:
            self._state = self._error = None
            self._task = asyncio.create_task(self._observe())
        while self._state is None or self._state is before:
            if self._error is not None:
                raise self._error.with_traceback(None)
            await self._wake.wait()
        return self._state

    async def _observe(self) -> None:
        while self._readers or time.monotonic() < self._used_at + LINGER_SECONDS:
            before = self._state
            try:
                state = await self._in_thread(partial(self._observation, before))
                self._error = None
                # The same object means that nothing has changed.
                self._state = before if before == state else state
            except Exception as error:
                if not isinstance(error, VcasgdError):
                    log.exception("the platform can't be observed")
                self._state, self._error = None, error
            if self._error or self._state is not before:
                self._wake.set()
                self._wake = anyio.Event()
            await anyio.sleep(OBSERVE_SECONDS)
        self._task = None

    def _observation(self, before: PlatformState | None) -> PlatformState:
        # Read the clock first: the next observation then covers jobs that are submitted meanwhile.
        at = self._feed.now()
        names = tuple(dict.fromkeys((*self._jobs.active(), *self._jobs.newest(NEWEST_JOBS))))
        machines = self._machines(before.machines if before else {})
        parts = {
            ("fleet", ""): self._fleet(machines).model_dump_json(),
            ("store", ""): self._store().model_dump_json(),
        }
        for name, brief in self._briefs(names).items():
            parts["job", name] = brief.model_dump_json()
        if before is None:
            return PlatformState(parts, machines, names, at, (), EventCursor(at))
        # An event of the millisecond before.at is not in the earlier observation.
        start = EventCursor(before.at - 1, LARGEST_NUMBER, LAST_JOB)
        new = self._read(names, start, at, MAX_SHARED_EVENTS)
        events, since = [*before.events, *(_shared(*event) for event in new)], before.events_since
        if len(new) == MAX_SHARED_EVENTS:
            # There may be more, which readers then read themselves.
            events, since = [], EventCursor(at)
        elif len(events) > MAX_SHARED_EVENTS:
            since = events[-MAX_SHARED_EVENTS - 1].cursor
            del events[:-MAX_SHARED_EVENTS]
        return PlatformState(parts, machines, names, at, tuple(events), since)

    def _briefs(self, names: Collection[str]) -> dict[str, JobBrief]:
        workers, costs = self._jobs.workers.counts(names), self._costs.of_all(names)
        amounts, briefs = dict(zip(names, costs, strict=True)), {}
        for name, job in self._jobs.get_many(names).items():
            with isolated(name):
                briefs[name] = job_brief(job, workers[name], amounts[name])
        return briefs

    def _machines(self, before: Mapping[str, MachineText]) -> dict[str, MachineText]:
        """Return all machines; only those whose text in the ledger changed are parsed."""
        machines = {}
        for name, source in sorted(self._control.machine_texts().items()):
            known = before.get(name)
            if known is None or known.source != source:
                row = Machine.model_validate({**json.loads(source), "id": name})
                known = MachineText(source, row, row.model_dump_json())
            machines[name] = known
        return machines

    def _fleet(self, machines: Mapping[str, MachineText]) -> FleetBrief:
        pools, rows = self._control.pools(), [machine.row for machine in machines.values()]
        return FleetBrief(
            controller=self._control.held(),
            machines=len(machines),
            joined=sum(bool(row.joined) for row in rows),
            blocked={name: row["reason"] for name, row in pools.items() if row.get("reason")},
            usd_per_hour=sum(row.price_per_hour or 0.0 for row in rows),
            deleted=self._jobs.deleted(DELETED_JOBS),
        )

    def _store(self) -> StoreBrief:
        names = ("versions", "queued", "unreplicated")
        nodes = {
            node: NodeBrief.model_validate({name: row.get(name) or {} for name in names})
            for node, row in self._servers.all().items()
        }
        return StoreBrief(nodes=nodes, ledger_full=read_gauges(self._ledger).full)


def _shared(cursor: EventCursor, event: Mapping[str, Any]) -> SharedEvent:
    return SharedEvent(cursor, json.dumps(finite(event)))


def _machine_texts(
    before: Mapping[str, MachineText] | None, after: Mapping[str, MachineText]
) -> Iterator[str]:
    """Yield what changed about machines as JSON, each about a bounded number of them."""
    changed = [
        machine.text
        for name, machine in after.items()
        if before is None or before.get(name) is not machine
    ]
    removed = [name for name in before or () if name not in after]
    if before is not None and not changed and not removed:
        return
    for first in range(0, max(len(changed), len(removed), 1), MACHINES_AT_ONCE):
        part = slice(first, first + MACHINES_AT_ONCE)
        whole = json.dumps(before is None and first == 0)
        rows, gone = ",".join(changed[part]), json.dumps(removed[part])
        yield f'{{"whole":{whole},"changed":[{rows}],"removed":{gone}}}'


def _encoded(kind: str, cursor: EventCursor, text: str) -> bytes:
    """Return a server-sent event.

    Every message has the position, so that a client without any event can resume too.
    """
    return ServerSentEvent(id=str(cursor), event=kind, data=text).encode()


def packed(messages: Iterable[bytes]) -> Iterator[bytes]:
    """Join messages to blocks of bounded size."""
    block: list[bytes] = []
    size = 0
    for message in messages:
        if block and size + len(message) > BLOCK_BYTES:
            yield b"".join(block)
            block, size = [], 0
        block.append(message)
        size += len(message)
    if block:
        yield b"".join(block)
