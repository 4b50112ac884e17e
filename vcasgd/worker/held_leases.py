"""The leases that a worker holds."""

from __future__ import annotations

import threading
from collections.abc import Collection

from vcasgd.store.ledger.leases import Lease, WorkKind


class WorkInterrupted(Exception):
    """The current work ends early, and its lease is taken care of."""


class HeldLeases:
    """Owned by the training thread; the heartbeat thread calls :meth:`all` and :meth:`drop`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, Lease] = {}
        #: Leases to resume later, from the position that their work has then.
        self._postponed: dict[str, Lease] = {}
        #: The lease of the work in progress.
        self.current: Lease | None = None

    def add(self, lease: Lease) -> None:
        with self._lock:
            self._held[lease.piece] = lease

    def drop(self, lease: Lease) -> None:
        """Record that a lease was lost, returned, or is done; a newer one of its work stays."""
        with self._lock:
            if self._held.get(lease.piece) == lease:
                del self._held[lease.piece]

    def has(self, lease: Lease) -> bool:
        """Return True if the lease isn't lost, returned, or done."""
        with self._lock:
            return self._held.get(lease.piece) == lease

    def all(self) -> list[Lease]:
        with self._lock:
            return list(self._held.values())

    # -- resuming ----------------------------------------------------------------------------------

    def postpone(self, lease: Lease) -> None:
        """Resume the lease's work later."""
        self._postponed[lease.piece] = lease

    def postpone_current(self) -> None:
        """Resume the current work later, because a server is unavailable."""
        if self.current is not None:
            self.postpone(self.current)
            self.current = None

    def is_postponed(self, lease: Lease) -> bool:
        return self._postponed.get(lease.piece) == lease

    @property
    def any_postponed(self) -> bool:
        return bool(self._postponed)

    def take_postponed(self, only: WorkKind | None = None) -> Lease | None:
        """Return a lease to resume, of one kind if given; None if there is none."""
        for piece, lease in list(self._postponed.items()):
            if not self.has(lease):
                del self._postponed[piece]
            elif only in (None, lease.kind):
                return self._postponed.pop(piece)
        return None

    # -- ending ------------------------------------------------------------------------------------

    def drop_current(self) -> Lease | None:
        """Drop the current lease, which was lost or returned; return it."""
        lease, self.current = self.current, None
        if lease is not None:
            self.drop(lease)
        return lease

    def settle(self, rework: Collection[int], unsettled: Collection[int]) -> None:
        """Postpone the subtasks to ``rework``, and drop those that are completely applied.

        ``unsettled`` are the subtasks with updates whose outcome isn't known yet.
        """
        for lease in self.all():
            if lease.kind is not WorkKind.TRAIN:
                continue
            if lease.number in rework:
                self.postpone(lease)
            elif (
                lease != self.current
                and lease.number not in unsettled
                and not self.is_postponed(lease)
            ):
                self.drop(lease)

    def unfinished(self) -> list[Lease]:
        """Return the leases whose work isn't trained completely."""
        leases = (self.current, *self._postponed.values())
        return [lease for lease in leases if lease is not None and self.has(lease)]
