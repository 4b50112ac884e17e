"""Recent changes of the platform as encoded messages, which all readers of the stream share."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from sse_starlette import ServerSentEvent

from vcasgd.store.ledger.events import EventCursor

#: An event with its position and its message.
SharedEvent = tuple[EventCursor, bytes]

#: Changes that are kept, and their bytes; a reader that is further behind gets the whole state.
MAX_CHANGES = 20
MAX_BYTES = 16 << 20
#: Bytes of whole messages that are sent at once, unless one message is longer. It bounds what a
#: reader that does not read occupies.
BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class StateChange:
    """The difference between two observations.

    It starts at the position ``since``. ``events`` is None if each reader has to read its own.
    """

    version: int
    since: EventCursor
    messages: tuple[bytes, ...]
    events: tuple[SharedEvent, ...] | None

    @cached_property
    def blocks(self) -> tuple[bytes, ...]:
        """All messages and events, in blocks."""
        return packed([*self.messages, *(message for _, message in self.events or ())])

    @property
    def size(self) -> int:
        """Number of bytes."""
        return sum(map(len, self.messages)) + sum(len(text) for _, text in self.events or ())

    def after(self, cursor: EventCursor) -> tuple[bytes, ...]:
        """Return the blocks for a reader that has the events up to a position."""
        if cursor <= self.since or not self.events:
            return self.blocks
        first = bisect_right(self.events, cursor, key=lambda event: event[0])
        return packed([*self.messages, *(message for _, message in self.events[first:])])


class Changes:
    """The newest changes, without gaps. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes: deque[StateChange] = deque()
        self._bytes = 0

    def add(self, change: StateChange) -> None:
        """Add the next change."""
        with self._lock:
            self._changes.append(change)
            self._bytes += change.size
            while self._changes and (len(self._changes) > MAX_CHANGES or self._bytes > MAX_BYTES):
                self._bytes -= self._changes.popleft().size

    def after(self, version: int, last: int) -> list[StateChange] | None:
        """Return the changes after a version, up to ``last``.

        Returns None if some are no longer kept, or lack their events.
        """
        with self._lock:
            found = [each for each in self._changes if version < each.version <= last]
        complete = len(found) == last - version and all(each.events is not None for each in found)
        return found if complete else None


def encoded(kind: str, cursor: EventCursor, text: str) -> bytes:
    """Return a server-sent event.

    Every message has the position, so that a client without any event can resume too.
    """
    return ServerSentEvent(id=str(cursor), event=kind, data=text).encode()


def packed(messages: Iterable[bytes]) -> tuple[bytes, ...]:
    """Join messages to blocks."""
    return tuple(_packed(messages))


def _packed(messages: Iterable[bytes]) -> Iterator[bytes]:
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
