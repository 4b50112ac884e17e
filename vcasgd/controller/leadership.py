"""Leadership: of several controllers, only the one that holds the lease in the ledger acts.

The controller's connections to the ledger carry its lease (:meth:`Leadership.fence`). One that
takes the lease closes those of its predecessor before it acts, and the ledger refuses new ones. So
a deposed controller writes nothing any more, also if it was suspended after a read, and it leaves.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from vcasgd.errors import Fenced, StoreError
from vcasgd.settings import Settings
from vcasgd.steady_time import boot_time
from vcasgd.store.ledger.control import Control, enter_lease
from vcasgd.threads import EssentialThread

log = logging.getLogger(__name__)

#: Share of the lease after which its holder stops acting without a renewal. A controller that takes
#: over starts when the renewals of its predecessor are that old, by its own clock. So never do two
#: act at once, although a step of the ledger's clock can end a lease at any time, and a machine can
#: be suspended.
SURE_SHARE = 0.5
#: Seconds that :meth:`Leadership.stop` waits for the thread.
STOP_SECONDS = 5.0


class LeaderThread(EssentialThread):
    """Thread that looks after something again and again. No error ends it or the controller.

    ``leads`` is False when another controller may act.
    """

    def __init__(self, name: str, leads: Callable[[], bool], pause_seconds: float) -> None:
        super().__init__(name)
        self._leads = leads
        #: Seconds until the next look.
        self._pause_seconds = pause_seconds
        self._stopped = threading.Event()

    @abstractmethod
    def look(self) -> None:
        """Do what is due, if this controller leads."""

    def work(self) -> None:
        """Look until :meth:`stop`."""
        while not self._stopped.wait(self._pause_seconds):
            try:
                self.look()
            except StoreError as error:
                log.warning("%s: %s", self.name, error)
            except Exception:
                log.exception("%s", self.name)

    def stop(self) -> None:
        """End :meth:`work` after the present look."""
        self._stopped.set()


class Leadership(EssentialThread):
    """Thread that takes the lease when it is free, and renews it until :meth:`stop`."""

    def __init__(self, control: Control, settings: Settings) -> None:
        super().__init__("leadership")
        self._control = control
        self._lease_seconds = settings.lease_seconds
        self._sure_seconds = settings.lease_seconds * SURE_SHARE
        self._period = settings.heartbeat
        self._owner = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        self._stopped = threading.Event()
        self._renewed_at: float | None = None
        self._token = 0
        self._deposed = False
        #: Time from which no predecessor acts, by :func:`boot_time`.
        self._alone_at = 0.0
        #: Renewals by another controller, and when this one first saw that number.
        self._seen = (0, 0.0)

    @property
    def sure(self) -> bool:
        """True if this process may act."""
        renewed, now = self._renewed_at, boot_time()
        return renewed is not None and now - renewed < self._sure_seconds and now >= self._alone_at

    def fence(self, connection: Any) -> None:
        """Bind a new connection to this controller's lease; see :func:`enter_lease`."""
        enter_lease(connection, self._owner)

    def check(self) -> None:
        """Raise :class:`Fenced` if another controller took the lease after this one had it."""
        if self._deposed:
            raise Fenced("another controller has taken over; this one leaves")

    def work(self) -> None:
        """Take and renew the lease."""
        while not self._stopped.is_set():
            try:
                self.renew()
            except StoreError as error:
                log.warning("ledger: %s", error)
            self._stopped.wait(self._period)

    def renew(self) -> None:
        """Take or renew the lease once, unless another controller holds it."""
        sent_at = boot_time()
        lease = self._control.hold(self._owner, self._lease_seconds)
        if not lease.token:
            self._renewed_at = None
            self._deposed = self._token > 0
            if lease.renewals != self._seen[0]:
                self._seen = (lease.renewals, boot_time())
            return
        if lease.token != self._token:
            self._deposed = self._token > 0
            self._control.close_others(self._owner)
            self._token = lease.token
            self._alone_at = self._end_of_predecessor(lease.renewals - 1)
        self._renewed_at = sent_at

    def _end_of_predecessor(self, renewals: int) -> float:
        """Return when the controller that renewed the lease so many times stops acting."""
        if renewals == 0:  # There was none, or it has released the lease.
            return 0.0
        number, seen_at = self._seen
        renewed_before = seen_at if number == renewals else boot_time()
        return renewed_before + self._sure_seconds

    def stop(self) -> None:
        """Stop renewing, and release the lease; without the ledger, it expires."""
        self._stopped.set()
        self.join(STOP_SECONDS)
        self._renewed_at = None
        if not self.is_alive():
            with suppress(StoreError):
                self._control.release(self._owner)
