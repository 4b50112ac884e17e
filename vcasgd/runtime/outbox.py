"""A worker's updates until they are applied.

A worker keeps what it pushed until the snapshot says that it is in there, and that the replicas
have it too, if there are any. It pushes it again when the tensors server came back empty, or
older after a failover. Sending happens in a thread of its own, so that the
next interval trains meanwhile; at most :data:`MOST_UNAPPLIED` updates wait at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from vcasgd.errors import Fenced, SnapshotMissing, StoreError, StoreFull, StoreUnavailable
from vcasgd.store.updates import Header, Status, UpdateSender

log = logging.getLogger(__name__)

#: a third one would let the worker train further from a model that it has not seen
MOST_UNAPPLIED = 2
#: pause between two looks while waiting; grows to the second number
POLL_SECONDS = (0.005, 0.1)
#: pause before a push is tried again
RETRY_SECONDS = 0.1


class Fate(Enum):
    """Where an update stands, as far as this worker knows."""

    WAITING = auto()  # to be sent
    SENT = auto()  # in the stream


@dataclass
class Item:
    """An update with its payload. ``payload`` is None where somebody else pushed it and this
    worker only watches that it is applied."""

    subtask: int
    epoch: int
    stop: int
    header: Header | None
    payload: memoryview | None
    fate: Fate
    #: version and writer of the snapshot in which it was first seen to be applied
    applied_in: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return self.header.update if self.header else "-"

    def is_safe(self, version: tuple[int, int], safe: int) -> bool:
        """Whether it is applied for good: also on the replicas. It is applied in ``version``."""
        # another writer, or an older version: a failover went back, and it was applied anew
        if self.applied_in is None or self.applied_in[1] != version[1] or self.applied_in > version:
            self.applied_in = version
        return safe >= self.applied_in[0]


@dataclass(frozen=True)
class Settled:
    """What a look brought: subtasks that must be trained again from where they stand."""

    version: tuple[int, int]
    rework: frozenset[int]
    rejected: tuple[tuple[int, str], ...]


class Outbox:
    """Thread-safe; :meth:`close` must be called. ``patience`` bounds each wait, in seconds."""

    def __init__(self, sender: UpdateSender, patience: float) -> None:
        self._sender = sender
        self._patience = patience
        self._items: list[Item] = []
        self._rework: set[int] = set()
        self._changed = threading.Condition()
        self._closed = False
        self.sent = 0
        self.sent_bytes = 0
        self.sent_again = 0
        self.discarded = 0
        self._thread = threading.Thread(target=self._send_all, name="outbox", daemon=True)
        self._thread.start()

    # -- the training thread's side ------------------------------------------------------------

    def submit(self, header: Header, epoch: int, payload: memoryview) -> None:
        """Takes over an update; the payload must not change afterwards. Returns at once."""
        item = Item(header.subtask, epoch, header.stop, header, payload, Fate.WAITING)
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def watch(self, subtask: int, epoch: int, size: int) -> None:
        """Watches a subtask that others pushed whole, until it is applied."""
        with self._changed:
            if not any(item.subtask == subtask for item in self._items):
                self._items.append(Item(subtask, epoch, size, None, None, Fate.SENT))

    def reached(self, subtask: int, token: int) -> int:
        """Up to which sample the updates made under a lease go; 0 where none is unapplied."""
        with self._changed:
            return max(
                (
                    item.stop
                    for item in self._items
                    if item.header is not None
                    and (item.header.subtask, item.header.token) == (subtask, token)
                ),
                default=0,
            )

    def settle(self) -> Settled:
        """Asks what became of the updates. Raises as :meth:`UpdateSender.status` does."""
        with self._changed:
            asked = [item for item in self._items if item.fate is Fate.SENT]
        status = self._sender.status(
            [(item.subtask, item.epoch, item.stop, item.name) for item in asked]
        )
        return self._sort(asked, status)

    def wait_for_room(self, give_up: Callable[[], bool], settle: Callable[[], None]) -> None:
        """Until fewer than :data:`MOST_UNAPPLIED` updates are unapplied.

        Raises :class:`StoreUnavailable` after ``patience`` seconds in which nothing moved.
        """
        deadline, pause = time.monotonic() + self._patience, POLL_SECONDS[0]
        before = self.unapplied
        while self.unapplied >= MOST_UNAPPLIED and not give_up():
            settle()
            if self.unapplied < before:
                before, deadline = self.unapplied, time.monotonic() + self._patience
            if time.monotonic() > deadline:
                raise StoreUnavailable("the parameter server applies nothing")
            time.sleep(pause)
            pause = min(pause * 2, POLL_SECONDS[1])

    def flush(self, seconds: float) -> bool:
        """Waits until everything is in the stream; False where the time was too short."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting(), timeout=seconds)

    def forget(self, subtask: int) -> None:
        """The lease was lost or the subtask is not wanted any more."""
        with self._changed:
            self._items = [item for item in self._items if item.subtask != subtask]
            self._rework.discard(subtask)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=5)

    @property
    def unapplied(self) -> int:
        """Updates with a payload that are not applied yet."""
        with self._changed:
            return sum(item.payload is not None for item in self._items)

    def subtasks(self) -> frozenset[int]:
        """Subtasks of which something is not applied yet."""
        with self._changed:
            return frozenset(item.subtask for item in self._items) | self._rework

    # -- inside --------------------------------------------------------------------------------

    def _sort(self, asked: list[Item], status: Status) -> Settled:
        rejected: list[tuple[int, str]] = []
        with self._changed:
            for item, fate in zip(asked, status.fates, strict=True):
                if fate == "applied":
                    if item.is_safe(status.version, status.safe):
                        self._drop(item)
                    continue
                item.applied_in = None
                if fate == "lost":
                    self._lost(item)
                elif fate.startswith("rejected:"):
                    rejected.append((item.subtask, fate.removeprefix("rejected:")))
                    self._drop(item)
                    self._rework.add(item.subtask)
            rework, self._rework = frozenset(self._rework), set()
            self._changed.notify_all()
        return Settled(status.version, rework, tuple(rejected))

    def _lost(self, item: Item) -> None:
        if item.payload is None:
            self._drop(item)
            self._rework.add(item.subtask)
        else:
            item.fate = Fate.WAITING
            self.sent_again += 1

    def _drop(self, item: Item) -> None:
        self._items = [each for each in self._items if each is not item]

    def _waiting(self) -> Item | None:
        return next((item for item in self._items if item.fate is Fate.WAITING), None)

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting() is not None)
                item = self._waiting()
                if self._closed or item is None:
                    return
            if not self._send(item):
                time.sleep(RETRY_SECONDS)

    def _send(self, item: Item) -> bool:
        """One attempt; False where it has to be tried again."""
        assert item.header is not None
        assert item.payload is not None
        try:
            answer = self._sender.push(item.header, item.epoch, item.payload)
        except (StoreUnavailable, StoreFull, SnapshotMissing) as error:
            log.debug("push of subtask %d: %s", item.subtask, error)
            return False
        except Fenced as error:
            log.info("subtask %d: %s", item.subtask, error)
            self._discard(item, rework=False)
            return True
        except StoreError:
            log.exception("subtask %d can't be pushed", item.subtask)
            self._discard(item, rework=True)
            return True
        if answer.accepted:
            self._accepted(item)
        else:
            # further than this update: somebody else did the work; before it: a part was lost
            done = answer.position < 0 or answer.position >= item.stop
            self._discard(item, rework=not done)
        return True

    def _accepted(self, item: Item) -> None:
        assert item.payload is not None
        with self._changed:
            item.fate = Fate.SENT
            self.sent += 1
            self.sent_bytes += len(item.payload)
            self._changed.notify_all()

    def _discard(self, item: Item, *, rework: bool) -> None:
        with self._changed:
            self._drop(item)
            self.discarded += 1
            if rework:
                self._rework.add(item.subtask)
            self._changed.notify_all()
