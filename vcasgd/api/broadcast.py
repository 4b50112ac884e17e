"""One task observes the platform for all readers of the stream, and wakes them after a change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import anyio
from anyio import CapacityLimiter, to_thread

from vcasgd.api.observer import PlatformObserver, PlatformState, event_message
from vcasgd.errors import VcasgdError
from vcasgd.store.ledger.events import EventCursor, EventFeed

log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Seconds between two observations of the platform; people can't read faster.
OBSERVE_SECONDS = 0.5
#: Seconds between two checks of a reader's token, if nothing changes.
CHECK_SECONDS = 1.0
#: Events of the platform that a reader reads itself at a time.
MAX_EVENTS = 200


class Broadcast:
    """The stream of changes. It observes only while there are readers.

    A reader never has a queue: it is woken after a change and takes what it lacks from the changes
    that are kept for all, or the whole state if it fell further behind. So a reader that does not
    read occupies only what is being sent to it.
    """

    def __init__(self, observer: PlatformObserver, feed: EventFeed) -> None:
        self._observer = observer
        self._feed = feed
        self._readers = 0
        self._task: asyncio.Task[None] | None = None
        self._wake = anyio.Event()
        self._state: PlatformState | None = None
        self._error: VcasgdError | None = None
        self._threads = CapacityLimiter(8)

    async def opening(self) -> tuple[PlatformState, tuple[bytes, ...]]:
        """Return the current state, and its messages.

        Raises :class:`~vcasgd.errors.StoreUnavailable`.
        """
        return await self._in_thread(self._observer.opening)

    async def follow(
        self,
        state: PlatformState,
        opening: tuple[bytes, ...],
        cursor: EventCursor,
        valid: Callable[[], Awaitable[bool]],
    ) -> AsyncIterator[bytes]:
        """Yield events after a position, the state, and then its changes, in blocks.

        Ends once ``valid`` returns False: the reader's token was revoked. Raises
        :class:`~vcasgd.errors.StoreUnavailable`.
        """
        jobs: tuple[str, ...] = ()
        async with self._following():
            while True:
                # a job that has ended may be missing from this state, but not its last events
                async for block in self._older((*{*jobs, *state.jobs},), cursor, state.at):
                    yield block
                for block in opening:
                    yield block
                cursor = max(cursor, EventCursor(state.at))
                while True:
                    before, newer = state, await self._after(state.version)
                    if not await valid():
                        return
                    if newer is None:
                        continue
                    state = newer
                    changes = self._observer.changes.after(before.version, state.version)
                    if changes is None:
                        break
                    for change in changes:
                        for block in change.after(cursor):
                            yield block
                    cursor = max(cursor, EventCursor(state.at))
                jobs = before.jobs
                state, opening = await self.opening()

    async def _older(
        self, jobs: tuple[str, ...], cursor: EventCursor, until: int
    ) -> AsyncIterator[bytes]:
        """Yield the events after a position and before a time, which this reader alone lacks."""
        while cursor < EventCursor(until):
            read = partial(self._feed.events, jobs, cursor, until, limit=MAX_EVENTS)
            events = await self._in_thread(read)
            if events:
                yield b"".join(event_message(at, event)[1] for at, event in events)
            if len(events) < MAX_EVENTS:
                return
            cursor = events[-1][0]

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._threads)

    # -- the task ------------------------------------------------------------------------------

    @asynccontextmanager
    async def _following(self) -> AsyncIterator[None]:
        self._readers += 1
        if self._task is None:
            self._state = self._error = None
            self._task = asyncio.create_task(self._observe())
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _after(self, version: int) -> PlatformState | None:
        """Return a state with a newer version, or None after some time without one.

        Raises what an observation raised.
        """
        with anyio.move_on_after(CHECK_SECONDS):
            while self._state is None or self._state.version <= version:
                if self._error is not None:
                    raise self._error
                await self._wake.wait()
            return self._state
        return None

    async def _observe(self) -> None:
        while True:
            before = self._state
            try:
                self._state, self._error = await self._in_thread(self._observer.observe), None
            except VcasgdError as error:
                self._error = error
            except Exception:
                log.exception("stream")
            if self._error or _version(self._state) != _version(before):
                self._wake.set()
                self._wake = anyio.Event()
            await anyio.sleep(OBSERVE_SECONDS)


def _version(state: PlatformState | None) -> int | None:
    return None if state is None else state.version
