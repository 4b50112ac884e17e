"""Waiting for replicas, so that a write is on more than one server.

Redis replicates asynchronously. ``WAIT n ms`` on the connection that wrote returns how many
replicas have that write. The count may be too small, and is checked here. Writes continue even
then: after a bounded time the store counts as *unreplicated*, which is logged, and no write waits
until the replica is back. docs/guarantees.md describes the consequences.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

#: Seconds that a write waits for its replica before the store counts as unreplicated.
REPLICA_SECONDS = 5.0
#: Seconds between two probes of whether the replica is back.
PROBE_SECONDS = 1.0
#: Timeout of a probe. It can be short, because the replica had the time since the last one.
PROBE_WAIT_MS = 20


def _nothing() -> None:
    """Do nothing: without Sentinel there is no way to check which server is the primary."""


class Replication:
    """State of a server's replicas, as one client sees it.

    ``replicas``: how many must have a write, at least 1. ``seconds``: how long to wait for
    them. ``confirm`` is called before a count that is too small is accepted. It raises if the
    server is no longer the primary, because the write will then be discarded.
    """

    def __init__(
        self,
        replicas: int,
        seconds: float = REPLICA_SECONDS,
        confirm: Callable[[], None] = _nothing,
    ) -> None:
        self._replicas = replicas
        self._seconds = seconds
        self._confirm = confirm
        self._probed_at = 0.0
        #: Unix time in seconds; None while acknowledged writes are on the replicas.
        self.unreplicated_since: float | None = None

    @property
    def holds(self) -> bool:
        """True if acknowledged writes are on the replicas."""
        return self.unreplicated_since is None

    def command(self) -> tuple[str, int, int] | None:
        """Return the command to send after a write, or None if waiting is pointless now."""
        if self.holds:
            return ("WAIT", self._replicas, int(self._seconds * 1000))
        if time.monotonic() - self._probed_at < PROBE_SECONDS:
            return None
        return ("WAIT", self._replicas, PROBE_WAIT_MS)

    def record_answer(self, acknowledged: int) -> None:
        """Process the answer to :meth:`command`. Raises as ``confirm`` does."""
        self._probed_at = time.monotonic()
        if acknowledged >= self._replicas:
            if not self.holds:
                log.warning("replicated again")
            self.unreplicated_since = None
            return
        self._confirm()
        if self.holds:
            log.warning("unreplicated: %d of %d replicas answered", acknowledged, self._replicas)
            self.unreplicated_since = time.time()
