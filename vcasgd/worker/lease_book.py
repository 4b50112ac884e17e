"""The leases that a worker holds, and what each is for at the moment."""

from __future__ import annotations

import threading
from collections.abc import Collection
from enum import Enum, auto

from vcasgd.store.ledger.leases import Lease, WorkKind


class WorkInterrupted(Exception):
    """The current work ends early, and its lease is taken care of."""


class LeaseState(Enum):
    """State of a lease that the worker holds."""

    #: Its work is in progress; at most one lease is in this state.
    WORKING = auto()
    #: Its subtask is trained, and updates of it aren't applied yet.
    SETTLING = auto()
    #: Its work is to be resumed, from the position that it has then.
    POSTPONED = auto()


class LeaseBook:
    """Owned by the training thread; the heartbeat thread calls :meth:`held` and :meth:`drop`.

    A lease that was lost, returned, or is done isn't in the book.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By work item, of which a worker has one lease at a time.
        self._entries: dict[str, tuple[Lease, LeaseState]] = {}

    def start(self, lease: Lease) -> None:
        """Record that the work of a new lease begins."""
        with self._lock:
            self._entries[lease.piece] = lease, LeaseState.WORKING

    def finish(self, lease: Lease) -> None:
        """Record that a subtask is trained, unless a part of it has to be trained again."""
        self._move(lease, LeaseState.WORKING, LeaseState.SETTLING)

    def postpone(self, lease: Lease) -> None:
        """Record that the work of a lease is to be resumed, if it is held."""
        for state in LeaseState:
            self._move(lease, state, LeaseState.POSTPONED)

    def resume(self, only: WorkKind | None = None) -> Lease | None:
        """Begin the work of a postponed lease, of one kind if given; None if there is none."""
        for lease in self.held(LeaseState.POSTPONED):
            if only in (None, lease.kind) and self._move(
                lease, LeaseState.POSTPONED, LeaseState.WORKING
            ):
                return lease
        return None

    def drop(self, lease: Lease) -> None:
        """Record that a lease was lost, returned, or is done; a newer one of its work stays."""
        with self._lock:
            if self._entries.get(lease.piece, (None,))[0] == lease:
                del self._entries[lease.piece]

    def settle(self, rework: Collection[int], unsettled: Collection[int]) -> None:
        """Postpone the subtasks to ``rework``, and drop those that are completely applied.

        ``unsettled`` are the subtasks with updates whose outcome isn't known yet.
        """
        for lease in self.held():
            if lease.kind is not WorkKind.TRAIN:
                continue
            if lease.number in rework:
                self.postpone(lease)
            elif self.state(lease) is LeaseState.SETTLING and lease.number not in unsettled:
                self.drop(lease)

    # -- questions ---------------------------------------------------------------------------------

    def held(self, *states: LeaseState) -> list[Lease]:
        """Return the leases in one of the states; all without any."""
        with self._lock:
            entries = list(self._entries.values())
        return [lease for lease, state in entries if not states or state in states]

    def state(self, lease: Lease) -> LeaseState | None:
        """Return the state of a lease; None if it was lost, returned, or is done."""
        with self._lock:
            held, state = self._entries.get(lease.piece, (None, None))
        return state if held == lease else None

    @property
    def working(self) -> Lease | None:
        """The lease of the work in progress; None without one."""
        return next(iter(self.held(LeaseState.WORKING)), None)

    def _move(self, lease: Lease, before: LeaseState, after: LeaseState) -> bool:
        """Change the state of a lease if it is the one ``before``; return True if it was."""
        with self._lock:
            if self._entries.get(lease.piece) != (lease, before):
                return False
            self._entries[lease.piece] = lease, after
            return True
