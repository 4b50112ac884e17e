"""One listing of machines for all who ask within a moment: clouds throttle those who ask often."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from vcasgd.fleet.providers.base import Instance

#: how long a listing is good for; machines take a minute to boot
LISTING_SECONDS = 2.0


class Listing:
    """Keeps what ``fetch`` returned for ``seconds``, unless it is told that it changed."""

    def __init__(
        self,
        fetch: Callable[[], list[Instance]],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetch = fetch
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._known: list[Instance] = []
        self._until = 0.0

    def get(self) -> list[Instance]:
        """Raises what ``fetch`` raises; then nothing is kept."""
        with self._lock:
            if self._clock() >= self._until:
                self._known = self._fetch()
                self._until = self._clock() + self._seconds
            return list(self._known)

    def changed(self) -> None:
        """The next who asks gets a fresh one."""
        with self._lock:
            self._until = 0.0
