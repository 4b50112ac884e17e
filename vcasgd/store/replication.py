"""Waiting for replicas: how a write is known to be on more than one server.

Redis replicates asynchronously. ``WAIT n ms`` on the connection that wrote returns how many
replicas have that write; the count may be short, and is checked here. A short count stops
nothing: after a bounded time the store counts as *unreplicated*, which is said, and nobody
waits any more until the replica is back. See docs/guarantees.md for what that means.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

#: how long a write waits for its replica before the store counts as unreplicated
REPLICA_SECONDS = 5.0
#: between two looks whether the replica is back
PROBE_SECONDS = 1.0
#: of such a look; the replica has had all the time since the last one
PROBE_WAIT_MS = 20


def _nothing() -> None:
    """Without Sentinel nobody can be asked who the primary is."""


class Replication:
    """What one client knows of its server's replicas.

    ``replicas``: how many must have a write, at least 1. ``seconds``: how long to wait for
    them. ``confirm`` is called before a short count is put up with: it raises where the server
    is no longer the primary, because then the write will be thrown away.
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
        #: Unix seconds; None while acknowledged writes are on the replicas
        self.unreplicated_since: float | None = None

    @property
    def holds(self) -> bool:
        """Whether what is acknowledged is on the replicas."""
        return self.unreplicated_since is None

    def command(self) -> tuple[str, int, int] | None:
        """What is to be sent behind a write; None where waiting would bring nothing now."""
        if self.holds:
            return ("WAIT", self._replicas, int(self._seconds * 1000))
        if time.monotonic() - self._probed_at < PROBE_SECONDS:
            return None
        return ("WAIT", self._replicas, PROBE_WAIT_MS)

    def heard(self, acknowledged: int) -> None:
        """The answer to :meth:`command`. Raises what ``confirm`` raises."""
        self._probed_at = time.monotonic()
        if acknowledged >= self._replicas:
            if not self.holds:
                log.warning("replicated again")
            self.unreplicated_since = None
            return
        self._confirm()
        if self.holds:
            log.warning("unreplicated: %d of %d replicas answer", acknowledged, self._replicas)
            self.unreplicated_since = time.time()
