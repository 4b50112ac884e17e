"""Bookkeeping of a worker's updates of one shard until they are applied; no threads, no network.

A worker keeps an update until a snapshot contains it, and until the replicas have that snapshot
if there are replicas. It pushes the update again if the tensors server came back empty, or older
after a failover.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import takewhile

from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.updates import Payload, UpdateStatus

#: Most unapplied updates of a shard. With a third one, a worker would train further and further
#: away from a model that it hasn't fetched.
MAX_UNAPPLIED = 2
#: Most delays kept until :meth:`PendingUpdates.take_delays`; the oldest are dropped first.
DELAYS_KEPT = 1000


class PushState(Enum):
    """State of a pending update, as far as this worker knows."""

    UNSENT = auto()
    SENT = auto()


@dataclass
class PendingUpdate:
    """An update that isn't applied yet.

    ``header`` and ``payload`` are None if another worker pushed it and this worker only watches
    whether it is applied.
    """

    subtask: int
    epoch: int
    stop: int
    header: Header | None
    payload: Payload | None
    state: PushState
    submitted_at: float = field(default_factory=time.monotonic)
    #: Version and writer of the snapshot that was first seen to contain it.
    applied_in: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return self.header.update if self.header else "-"

    @property
    def start(self) -> int:
        return self.header.start if self.header else 0

    def is_safe(self, version: tuple[int, int], safe: int) -> bool:
        """Return True if the update can't be lost any more: the replicas have it, too.

        ``version`` is the present snapshot, which contains the update; the replicas have all
        versions up to ``safe``.
        """
        # Another writer or an older version: a failover went back, so it was applied again.
        if self.applied_in is None or self.applied_in[1] != version[1] or self.applied_in > version:
            self.applied_in = version
        return safe >= self.applied_in[0]


@dataclass(frozen=True)
class Settled:
    """Outcome of pushed updates.

    ``rework`` are subtasks that must be trained again from their current position; ``rejected``
    are subtasks with the reason why an update of them was rejected.
    """

    rework: frozenset[int]
    rejected: tuple[tuple[int, str], ...]


class PendingUpdates:
    """The updates of one shard in the order of submission. Not thread-safe."""

    def __init__(self) -> None:
        self._updates: list[PendingUpdate] = []
        self._rework: set[int] = set()
        self._rejected: list[tuple[int, str]] = []
        self._delays: deque[float] = deque(maxlen=DELAYS_KEPT)
        self.added = 0
        self.sent = 0
        self.sent_bytes = 0
        self.sent_again = 0
        self.discarded = 0

    def add(self, header: Header, epoch: int, payload: Payload) -> None:
        """Add an update to push."""
        self.added += 1
        self._updates.append(
            PendingUpdate(header.subtask, epoch, header.stop, header, payload, PushState.UNSENT)
        )

    def watch(self, subtask: int, epoch: int, size: int) -> None:
        """Watch a subtask that other workers pushed completely, until it is applied."""
        if not any(update.subtask == subtask for update in self._updates):
            self._updates.append(PendingUpdate(subtask, epoch, size, None, None, PushState.SENT))

    def forget(self, subtask: int) -> None:
        """Drop a subtask, because its lease was lost or is no longer needed."""
        self._updates = [update for update in self._updates if update.subtask != subtask]
        self._rework.discard(subtask)

    # -- state -------------------------------------------------------------------------------------

    def next_unsent(self) -> PendingUpdate | None:
        """Return the oldest update that has to be pushed."""
        return next((each for each in self._updates if each.state is PushState.UNSENT), None)

    def all_sent(self) -> list[PendingUpdate]:
        """Return the updates whose outcome isn't known yet."""
        return [update for update in self._updates if update.state is PushState.SENT]

    def names_before(self, update: PendingUpdate) -> list[str]:
        """Return the names of own updates that were submitted before one and aren't applied."""
        before = takewhile(lambda each: each is not update, self._updates)
        return [each.name for each in before if each.payload is not None]

    def reached(self, subtask: int, token: int) -> int:
        """Return the end of the updates made under a lease, in samples; 0 if there are none."""
        stops = (
            update.stop
            for update in self._updates
            if update.header is not None
            and (update.header.subtask, update.header.token) == (subtask, token)
        )
        return max(stops, default=0)

    @property
    def unapplied(self) -> int:
        """Number of updates with a payload."""
        return sum(update.payload is not None for update in self._updates)

    @property
    def settled(self) -> int:
        """Number of added updates that the present version contains, or will never contain."""
        unsettled = (each.payload is not None and each.applied_in is None for each in self._updates)
        return self.added - sum(unsettled)

    def subtasks(self) -> frozenset[int]:
        """Return the subtasks that aren't completely applied, or whose outcome isn't taken yet."""
        return frozenset(update.subtask for update in self._updates) | self._rework

    def take_settled(self) -> Settled:
        """Return the outcomes since the last call."""
        settled = Settled(frozenset(self._rework), tuple(self._rejected))
        self._rework.clear()
        self._rejected.clear()
        return settled

    def take_delays(self) -> list[float]:
        """Return, for each update applied since the last call, the seconds from its submission
        until this worker saw that it was applied."""
        delays = list(self._delays)
        self._delays.clear()
        return delays

    # -- outcome of a push -------------------------------------------------------------------------

    def on_accepted(self, update: PendingUpdate) -> None:
        """Record that the update is in the stream."""
        assert update.payload is not None
        update.state = PushState.SENT
        self.sent += 1
        self.sent_bytes += len(update.payload)

    def on_refused(self, update: PendingUpdate, position: int) -> None:
        """Record that the update doesn't continue its subtask, which is at sample ``position``;
        −1 if the whole subtask is applied."""
        if position < 0:
            # This update may be a part of that, so it is kept until the replicas have it.
            update.state = PushState.SENT
        elif not self._resend_before(update, position):
            # Beyond this update: another worker did the work. Before it: a part was lost.
            self.discard(update, rework=position < update.stop)

    def discard(self, update: PendingUpdate, *, rework: bool) -> None:
        """Drop an update that can't be pushed. ``rework``: its samples must be trained again."""
        self._drop(update)
        self.discarded += 1
        if rework:
            self._rework.add(update.subtask)

    def _resend_before(self, update: PendingUpdate, position: int) -> bool:
        """Push earlier updates again if the server lost them and they are still here.

        Returns False if they don't reach from ``position`` up to the update.
        """
        lost = [
            each
            for each in self._updates
            if each.subtask == update.subtask
            and each.header is not None
            and each.header.start >= position
            and each.stop <= update.start
        ]
        if not lost or lost[0].start != position:
            return False
        for each in lost:
            each.applied_in = None
            if each.state is PushState.SENT:
                self._on_lost(each)
        return True

    # -- outcome of sent updates -------------------------------------------------------------------

    def on_status(self, updates: Sequence[PendingUpdate], status: UpdateStatus) -> None:
        """Record what the server reports about ``updates``, in the same order."""
        for update, fate in zip(updates, status.fates, strict=True):
            if fate == "applied":
                if update.is_safe(status.version, status.safe):
                    self._on_applied(update)
                continue
            update.applied_in = None
            if fate == "lost":
                self._on_lost(update)
            elif fate.startswith("rejected:"):
                self._rejected.append((update.subtask, fate.removeprefix("rejected:")))
                self._drop(update)
                self._rework.add(update.subtask)

    def _on_applied(self, update: PendingUpdate) -> None:
        if update.payload is not None:
            self._delays.append(time.monotonic() - update.submitted_at)
        self._drop(update)

    def _on_lost(self, update: PendingUpdate) -> None:
        if update.payload is None:
            self._drop(update)
            self._rework.add(update.subtask)
        else:
            update.state = PushState.UNSENT
            self.sent_again += 1

    def _drop(self, update: PendingUpdate) -> None:
        self._updates = [each for each in self._updates if each is not update]
