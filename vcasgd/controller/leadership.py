"""Leadership: of several controllers, only the one that holds the lease in the ledger acts."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time

from vcasgd.errors import StoreError
from vcasgd.settings import Settings
from vcasgd.store.ledger.servers import Control
from vcasgd.threads import EssentialThread

log = logging.getLogger(__name__)

#: Share of the lease after which its holder stops acting without a renewal, so that it has stopped
#: before another controller can start.
SURE_SHARE = 0.5


class Leadership(EssentialThread):
    """Thread that takes the lease when it is free, and renews it until :meth:`stop`."""

    def __init__(self, control: Control, settings: Settings) -> None:
        super().__init__("leadership")
        self._control = control
        self._lease_seconds = settings.lease_seconds
        self._period = settings.heartbeat / 2
        self._owner = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        self._stopped = threading.Event()
        self._renewed_at: float | None = None

    @property
    def sure(self) -> bool:
        """True if this process may act."""
        renewed = self._renewed_at
        within = self._lease_seconds * SURE_SHARE
        return renewed is not None and time.monotonic() - renewed < within

    def work(self) -> None:
        """Take and renew the lease."""
        while not self._stopped.is_set():
            sent_at = time.monotonic()
            try:
                held = self._control.hold(self._owner, self._lease_seconds) > 0
                self._renewed_at = sent_at if held else None
            except StoreError as error:
                log.warning("ledger: %s", error)
            self._stopped.wait(self._period)

    def stop(self) -> None:
        """Stop renewing; the lease expires."""
        self._stopped.set()
