"""A worker's updates of one shard until they are applied.

A worker keeps what it pushed until the snapshot says that it is in there, and that the replicas
have it too, if there are any. It pushes it again when the tensors server came back empty, or
older after a failover. Sending happens in a thread of its own, so that the
next interval trains meanwhile; at most :data:`MOST_UNAPPLIED` updates wait at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from vcasgd.errors import (
    Fenced,
    SnapshotMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from vcasgd.store.tensors.updates import Header, Payload, UpdateSender, UpdateStatus

log = logging.getLogger(__name__)

#: a third one would let the worker train further from a model that it has not seen
MOST_UNAPPLIED = 2
#: pause before a push is tried again
RETRY_SECONDS = 0.1
#: delays that wait for somebody to look at them; the oldest give way
DELAYS_KEPT = 1000


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
    payload: Payload | None
    fate: Fate
    submitted_at: float = field(default_factory=time.monotonic)
    #: version and writer of the snapshot in which it was first seen to be applied
    applied_in: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return self.header.update if self.header else "-"

    @property
    def start(self) -> int:
        return self.header.start if self.header else 0

    def is_safe(self, version: tuple[int, int], safe: int) -> bool:
        """Whether it is applied for good: also on the replicas. It is applied in ``version``."""
        # another writer, or an older version: a failover went back, and it was applied anew
        if self.applied_in is None or self.applied_in[1] != version[1] or self.applied_in > version:
            self.applied_in = version
        return safe >= self.applied_in[0]


@dataclass(frozen=True)
class Settled:
    """What looks brought: subtasks that must be trained again from where they stand, and
    why updates of which subtasks were refused."""

    rework: frozenset[int]
    rejected: tuple[tuple[int, str], ...]


class Outbox:
    """Thread-safe; :meth:`close` must be called."""

    def __init__(self, sender: UpdateSender) -> None:
        self._sender = sender
        self._items: list[Item] = []
        self._rework: set[int] = set()
        self._rejected: list[tuple[int, str]] = []
        self._changed = threading.Condition()
        self._closed = False
        self.sent = 0
        self.sent_bytes = 0
        self.sent_again = 0
        self.discarded = 0
        self._delays: deque[float] = deque(maxlen=DELAYS_KEPT)
        self._thread = threading.Thread(target=self._send_all, name="outbox", daemon=True)
        self._thread.start()

    # -- the training thread's side ------------------------------------------------------------

    def submit(self, header: Header, epoch: int, payload: Payload) -> None:
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

    def look(self) -> tuple[int, int]:
        """Asks what became of the updates; returns the present version and its writer.

        Raises as :meth:`UpdateSender.status` does.
        """
        with self._changed:
            asked = [item for item in self._items if item.fate is Fate.SENT]
        status = self._sender.status(
            [(item.subtask, item.epoch, item.stop, item.name) for item in asked]
        )
        self._sort(asked, status)
        return status.version

    def collect(self) -> Settled:
        """What looks and pushes brought since the last time, said once."""
        with self._changed:
            settled = Settled(frozenset(self._rework), tuple(self._rejected))
            self._rework.clear()
            self._rejected.clear()
        return settled

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

    def take_delays(self) -> list[float]:
        """Seconds from the submission of an update until this worker saw that it is applied,
        of those that were applied since the last call."""
        with self._changed:
            delays = list(self._delays)
            self._delays.clear()
        return delays

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

    @property
    def full(self) -> bool:
        """Whether :data:`MOST_UNAPPLIED` updates are unapplied."""
        return self.unapplied >= MOST_UNAPPLIED

    def subtasks(self) -> frozenset[int]:
        """Subtasks of which something is not applied yet, or not collected."""
        with self._changed:
            return frozenset(item.subtask for item in self._items) | self._rework

    # -- inside --------------------------------------------------------------------------------

    def _sort(self, asked: list[Item], status: UpdateStatus) -> None:
        with self._changed:
            for item, fate in zip(asked, status.fates, strict=True):
                if fate == "applied":
                    if item.is_safe(status.version, status.safe):
                        if item.payload is not None:
                            self._delays.append(time.monotonic() - item.submitted_at)
                        self._drop(item)
                    continue
                item.applied_in = None
                if fate == "lost":
                    self._lost(item)
                elif fate.startswith("rejected:"):
                    self._rejected.append((item.subtask, fate.removeprefix("rejected:")))
                    self._drop(item)
                    self._rework.add(item.subtask)
            self._changed.notify_all()

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
        except (StoreUnavailable, StoreDenied, StoreFull, SnapshotMissing) as error:
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
        elif not self._went_back(item, answer.position):
            # further than this update: somebody else did the work; before it: a part was lost
            done = answer.position < 0 or answer.position >= item.stop
            self._discard(item, rework=not done)
        return True

    def _went_back(self, item: Item, position: int) -> bool:
        """Whether what was refused continues an update that the server has forgotten, and that
        is here still: then that one is sent again first."""
        with self._changed:
            forgotten = [
                each
                for each in self._items
                if each.subtask == item.subtask
                and each.header is not None
                and each.header.start >= position
                and each.stop <= item.start
            ]
            if not forgotten or forgotten[0].start != position:
                return False
            for each in forgotten:
                each.applied_in = None
                if each.fate is Fate.SENT:
                    self._lost(each)
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
