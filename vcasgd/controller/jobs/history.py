"""The thread that keeps the histories of all jobs within the limits of the settings."""

from __future__ import annotations

import logging
import threading

from vcasgd.controller.leadership import Leadership
from vcasgd.errors import StoreError
from vcasgd.settings import Settings
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.history_limits import HistoryKeeper, HistoryLimits
from vcasgd.threads import EssentialThread

log = logging.getLogger(__name__)

#: Seconds between two looks at all jobs. In between, histories may exceed their limits.
LOOK_SECONDS = 60.0


class HistoryThread(EssentialThread):
    """Apart from the job loop, because 100,000 points take seconds."""

    def __init__(self, settings: Settings, ledger: RedisClient, leadership: Leadership) -> None:
        super().__init__("history")
        self._keeper = HistoryKeeper(
            ledger,
            HistoryLimits(
                settings.keep_points,
                settings.keep_events,
                settings.keep_log_lines,
                settings.keep_ended_share,
            ),
        )
        self._leadership = leadership
        self._stopped = threading.Event()

    def work(self) -> None:
        """Enforce the limits while this controller is the leader, until :meth:`stop`."""
        while not self._stopped.wait(LOOK_SECONDS):
            if self._leadership.sure:
                try:
                    self._keeper.enforce()
                except StoreError as error:
                    log.warning("ledger: %s", error)

    def stop(self) -> None:
        """End :meth:`work`."""
        self._stopped.set()
