"""The controller's sign of life, which machines of clouds can read without any credentials of ours.

It is an object that the controller replaces again and again. Only its changes count, so no clocks
are compared. It lies beside the packages, which workers' machines may read but not write.
"""

from __future__ import annotations

import logging
import threading
import time

from vcasgd.errors import NotFound, StorageUnavailable
from vcasgd.storage.objects import Storage
from vcasgd.threads import EssentialThread

log = logging.getLogger(__name__)

LIFE_SIGN = "packages/controller"
#: Signs in the time after which a machine without any ends.
SIGNS = 12


class LifeSign(EssentialThread):
    """Thread that replaces the sign after each :meth:`beat`, at most every ``pause_seconds``.

    A storage that is slow or unavailable therefore delays nothing else.
    """

    def __init__(self, storage: Storage, pause_seconds: float) -> None:
        super().__init__("life sign")
        self._storage = storage
        self._pause_seconds = pause_seconds
        self._beaten = threading.Event()
        self._stopped = threading.Event()

    def beat(self) -> None:
        """Record that the fleet is managed."""
        self._beaten.set()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._beaten.set()

    def work(self) -> None:
        """Replace the sign while there are beats, until :meth:`stop`."""
        while self._beaten.wait() and not self._stopped.is_set():
            self._beaten.clear()
            try:
                self._storage.put(LIFE_SIGN, str(time.time_ns()).encode())
            except StorageUnavailable as error:
                log.warning("sign of life: %s", error)
            self._stopped.wait(self._pause_seconds)


def read_life_sign(storage: Storage) -> bytes | None:
    """Return the present sign; None if there is none or the storage is unavailable."""
    try:
        return storage.get(LIFE_SIGN)
    except (NotFound, StorageUnavailable) as error:
        log.warning("sign of life: %s", error)
        return None


class Silence:
    """Time since the last new sign, or since the start of this process; ``now`` in seconds."""

    def __init__(self, now: float) -> None:
        self._sign: bytes | None = None
        self._since = now

    def seconds(self, sign: bytes | None, now: float) -> float:
        """Return the seconds of silence, after a look at the present sign."""
        if sign is not None and sign != self._sign:
            self._sign, self._since = sign, now
        return now - self._since
