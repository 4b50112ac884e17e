"""The updates of one shard that a worker keeps until they are applied; no network.

A worker keeps an update until a snapshot contains it, and until the replicas have that snapshot
if there are replicas. It pushes the update again if the tensors server came back empty, or older
after a failover.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import takewhile

from vcasgd.errors import VcasgdError
from vcasgd.learning.encodings.payload import EncodedVector
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.updates import Payload, UpdateStatus
from vcasgd.worker.vectors import Vector

#: Most unapplied updates of a shard. With a third one, a worker would train further and further
#: away from a model that it hasn't fetched.
MAX_UNAPPLIED = 2
#: Most delays kept in :attr:`UpdateQueue.delays`; the oldest are dropped first.
DELAYS_KEPT = 1000


class UpdateState(Enum):
    """State of an update, as far as this worker knows."""

    #: It has to be pushed.
    UNSENT = auto()
    #: It is in the stream.
    SENT = auto()
    #: A snapshot contains it, which the replicas may lack.
    APPLIED = auto()


@dataclass(eq=False)
class QueuedUpdate:
    """An update that isn't applied for good yet.

    ``header`` is None if another worker pushed it and this worker only watches whether it is
    applied. ``vectors`` is the memory that the update needs, which it holds. ``encode()`` makes the
    ``payload``, and is None once that is done.
    """

    subtask: int
    epoch: int
    stop: int
    header: Header | None = None
    payload: Payload | None = None
    vectors: tuple[Vector, ...] = ()
    encode: Callable[[], EncodedVector] | None = None
    state: UpdateState = UpdateState.UNSENT
    submitted_at: float = field(default_factory=time.monotonic)
    #: Version and writer of the snapshot that was first seen to contain it, once it is applied.
    applied_in: tuple[int, int] = (-1, -1)

    @property
    def own(self) -> bool:
        """True if this worker pushes it."""
        return self.header is not None

    @property
    def name(self) -> str:
        return self.header.update if self.header else "-"

    @property
    def start(self) -> int:
        return self.header.start if self.header else 0

    def apply(self, version: tuple[int, int], safe: int) -> bool:
        """Record that the present snapshot contains it; return True if it can't be lost any more.

        ``version`` is that snapshot with its writer; the replicas have all versions up to ``safe``.
        """
        # Another writer or an older version: a failover went back, so it was applied again.
        is_other = self.applied_in[1] != version[1] or self.applied_in > version
        if self.state is not UpdateState.APPLIED or is_other:
            self.applied_in = version
        self.state = UpdateState.APPLIED
        return safe >= self.applied_in[0]


@dataclass(frozen=True)
class Settled:
    """Outcome of pushed updates.

    ``rework`` are subtasks that must be trained again from their current position; ``rejected``
    are subtasks with the reason why an update of them was rejected.
    """

    rework: frozenset[int]
    rejected: tuple[tuple[int, str], ...]


class UpdateQueue:
    """The updates of one shard in the order of submission. Thread-safe.

    ``max_unapplied`` updates make it :attr:`full`.
    """

    def __init__(self, max_unapplied: int = MAX_UNAPPLIED) -> None:
        self.max_unapplied = max_unapplied
        #: Guards everything below, and is notified when it changes.
        self._changed = threading.Condition(threading.RLock())
        self._updates: list[QueuedUpdate] = []
        #: Those that were being pushed when the server was asked last.
        self._under_way: set[QueuedUpdate] = set()
        self._rework: set[int] = set()
        self._rejected: list[tuple[int, str]] = []
        self._closed = False
        #: What ended the thread that pushes, and why an update could not be encoded.
        self._error: Exception | None = None
        self._unsound: VcasgdError | None = None
        #: Seconds from the submission of an applied update until this worker saw that.
        self.delays: deque[float] = deque(maxlen=DELAYS_KEPT)
        #: Updates that were added, accepted with their bytes, pushed again, and given up.
        self.added = self.sent = self.sent_bytes = self.sent_again = self.discarded = 0

    def add(
        self,
        header: Header,
        epoch: int,
        payload: Payload | Callable[[], EncodedVector],
        *vectors: Vector,
    ) -> QueuedUpdate:
        """Add an update to push, which holds ``vectors`` from now on.

        The first of them is the one that the payload refers to. The payload may be a function that
        makes it, from all of them: the thread that pushes calls it.
        """
        update = QueuedUpdate(header.subtask, epoch, header.stop, header, vectors=vectors)
        if callable(payload):
            update.encode = payload
        else:
            update.payload = payload
        for vector in vectors:
            vector.hold()
        with self._changed:
            self.added += 1
            self._updates.append(update)
            self._changed.notify_all()
        return update

    def watch(self, subtask: int, epoch: int, size: int) -> None:
        """Watch a subtask that other workers pushed completely, until it is applied."""
        with self._changed:
            if not any(update.subtask == subtask for update in self._updates):
                self._updates.append(QueuedUpdate(subtask, epoch, size, state=UpdateState.SENT))

    def forget(self, subtask: int) -> None:
        """Drop a subtask, because its lease was lost or is no longer needed."""
        with self._changed:
            for update in [update for update in self._updates if update.subtask == subtask]:
                self._drop(update)
            self._rework.discard(subtask)

    def close(self, error: Exception | None = None) -> None:
        """End the waits; ``error`` ended the thread that pushes."""
        with self._changed:
            self._closed, self._error = True, error or self._error
            self._changed.notify_all()

    # -- state -------------------------------------------------------------------------------------

    def take_unsent(self) -> QueuedUpdate | None:
        """Wait for an update to push, and hold its vectors; None once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next_unsent() is not None)
            update = None if self._closed else self._next_unsent()
            for vector in update.vectors if update else ():
                vector.hold()
            return update

    def encode(self, update: QueuedUpdate) -> bool:
        """Make the payload of an update if it has none; return False if that fails.

        Called by the thread that pushes. The error is that of the next :meth:`take_settled`.
        """
        if update.encode is None:
            return True
        try:
            encoded = update.encode()
        except VcasgdError as error:
            self.discard(update, rework=True)
            self._unsound = error
            return False
        assert update.header is not None
        changes = {"codec": encoded.codec, "size": len(encoded)}
        with self._changed:
            update.header = update.header.model_copy(update=changes)
            update.payload, update.encode = encoded, None
            needless, update.vectors = update.vectors[1:], update.vectors[:1]
            if update in self._updates:
                for vector in needless:
                    vector.release()
            self._changed.notify_all()
        return True

    def await_accepted(self, seconds: float) -> bool:
        """Wait until all updates are in the stream; False if that takes longer."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._next_unsent() is None or self._error is not None, timeout=seconds
            )
            return self._next_unsent() is None

    def pause(self, seconds: float) -> None:
        """Wait, at most until the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, timeout=seconds)

    def pushed(self) -> list[QueuedUpdate]:
        """Return the updates that the server may have, to ask for their outcome.

        One that is being pushed can be in a snapshot before this worker knows that it arrived.
        """
        with self._changed:
            asked = [each for each in self._updates if not each.own or each.payload is not None]
            self._under_way = {each for each in asked if each.state is UpdateState.UNSENT}
            return asked

    def names_before(self, update: QueuedUpdate) -> list[str]:
        """Return the names of own updates that were submitted before one and aren't applied."""
        with self._changed:
            before = takewhile(lambda earlier: earlier is not update, self._updates)
            return [earlier.name for earlier in before if earlier.own]

    def reached(self, subtask: int, token: int) -> int:
        """Return the end of the updates made under a lease, in samples; 0 if there are none."""
        with self._changed:
            stops = (
                update.stop
                for update in self._updates
                if update.header is not None
                and (update.header.subtask, update.header.token) == (subtask, token)
            )
            return max(stops, default=0)

    @property
    def unapplied(self) -> int:
        """Number of own updates that aren't applied for good."""
        with self._changed:
            return sum(update.own for update in self._updates)

    @property
    def encoded(self) -> bool:
        with self._changed:
            return all(update.encode is None for update in self._updates)

    @property
    def full(self) -> bool:
        """True if the queue takes no further update until one is applied."""
        return self.unapplied >= self.max_unapplied

    @property
    def settled(self) -> int:
        """Number of added updates that the present version contains, or will never contain."""
        with self._changed:
            return self.added - sum(
                update.own and update.state is not UpdateState.APPLIED for update in self._updates
            )

    def subtasks(self) -> frozenset[int]:
        """Return the subtasks that aren't completely applied, or whose outcome isn't taken yet."""
        with self._changed:
            return frozenset(update.subtask for update in self._updates) | self._rework

    def take_settled(self) -> Settled:
        """Return the outcomes since the last call.

        Raises the error of the thread that pushes, and that of an update that could not be encoded.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._unsound is not None:
                unsound, self._unsound = self._unsound, None
                raise unsound
            settled = Settled(frozenset(self._rework), tuple(self._rejected))
            self._rework.clear()
            self._rejected.clear()
            return settled

    # -- outcome of a push -------------------------------------------------------------------------

    def on_accepted(self, update: QueuedUpdate) -> None:
        """Record that the update is in the stream."""
        assert update.payload is not None
        with self._changed:
            if update.state is UpdateState.UNSENT:
                update.state = UpdateState.SENT
            self.sent += 1
            self.sent_bytes += len(update.payload)
            self._changed.notify_all()

    def on_refused(self, update: QueuedUpdate, position: int) -> None:
        """Record that the update doesn't continue its subtask, which is at sample ``position``;
        −1 if the whole subtask is applied."""
        with self._changed:
            if update.state is UpdateState.APPLIED:
                return
            if position < 0:
                # This update may be a part of that, so it is kept until the replicas have it.
                update.state = UpdateState.SENT
            elif not self._resend_before(update, position):
                # Beyond this update: another worker did the work. Before it: a part was lost.
                self.discard(update, rework=position < update.stop)
            self._changed.notify_all()

    def discard(self, update: QueuedUpdate, *, rework: bool) -> None:
        """Drop an update that can't be pushed. ``rework``: its samples must be trained again."""
        with self._changed:
            self._drop(update)
            self.discarded += 1
            if rework:
                self._rework.add(update.subtask)

    def _resend_before(self, update: QueuedUpdate, position: int) -> bool:
        """Push earlier updates again if the server lost them and they are still here.

        Returns False if they don't reach from ``position`` up to the update.
        """
        lost = [
            earlier
            for earlier in self._updates
            if earlier.subtask == update.subtask
            and earlier.header is not None
            and earlier.start >= position
            and earlier.stop <= update.start
        ]
        if not lost or lost[0].start != position:
            return False
        for earlier in lost:
            if earlier.state is not UpdateState.UNSENT:
                self._on_lost(earlier)
        return True

    # -- outcome of sent updates -------------------------------------------------------------------

    def on_status(self, updates: Sequence[QueuedUpdate], status: UpdateStatus) -> None:
        """Record what the server reports about the last ones that were :meth:`pushed`."""
        with self._changed:
            for update, outcome in zip(updates, status.outcomes, strict=True):
                if outcome == "applied":
                    if update.apply(status.version, status.safe):
                        if update.own:
                            self.delays.append(time.monotonic() - update.submitted_at)
                        self._drop(update)
                elif update in self._under_way:
                    continue  # It may have come after the question.
                elif outcome == "lost":
                    self._on_lost(update)
                elif outcome.startswith("rejected:"):
                    self._rejected.append((update.subtask, outcome.removeprefix("rejected:")))
                    self._drop(update)
                    self._rework.add(update.subtask)
                else:
                    update.state = UpdateState.SENT
            self._under_way.clear()
            self._changed.notify_all()

    def _on_lost(self, update: QueuedUpdate) -> None:
        if not update.own:
            self._drop(update)
            self._rework.add(update.subtask)
        else:
            update.state = UpdateState.UNSENT
            self.sent_again += 1

    def _next_unsent(self) -> QueuedUpdate | None:
        unsent = (update for update in self._updates if update.state is UpdateState.UNSENT)
        return next(unsent, None)

    def _drop(self, update: QueuedUpdate) -> None:
        """Drop an update, unless that was done before, and release its vectors."""
        remaining = [other for other in self._updates if other is not update]
        if len(remaining) < len(self._updates):
            self._updates = remaining
            for vector in update.vectors:
                vector.release()
        self._changed.notify_all()
