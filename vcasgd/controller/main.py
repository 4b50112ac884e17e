"""The controller's process: both loops, under the controller's lease."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import NoReturn

from vcasgd.controller.fleet.context import ControllerContext
from vcasgd.controller.fleet.loop import FleetLoop
from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.controller.jobs.loop import JobLoop
from vcasgd.controller.leadership import Leadership
from vcasgd.errors import StoreUnavailable, VcasgdError
from vcasgd.logging import configure_logging, exit_status
from vcasgd.settings import Settings, load_settings
from vcasgd.store.connection import connect, patiently
from vcasgd.store.ledger.servers import Control

log = logging.getLogger(__name__)


class Controller:
    """Both loops, under the controller's lease."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ledger = connect(settings.secret("ledger_url"))
        self._nodes = [connect(url, waits=False) for url in settings.tensors_urls()]
        self._control = Control(self._ledger)
        self._leadership = Leadership(self._control, settings)
        self._stop = threading.Event()
        self._looked = False

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> None:
        """Until :meth:`stop`. Raises :class:`ClusterError` when Ray's head was lost, and
        :class:`~vcasgd.errors.SpecError` where the ledger is another cluster's."""
        own = Control(self._ledger)
        patiently(lambda: own.claim(self._settings.cluster), self._settings.patience_seconds)
        self._leadership.start()
        while not self._stop.is_set() and not self._leadership.sure:
            self._stop.wait(self._settings.heartbeat / 4)
        jobs = JobLoop(self._settings, self._ledger, self._nodes, self._leadership)
        jobs.start()
        try:
            self._keep_fleet()
        finally:
            jobs.stop(checkpoint=self._stop.is_set())
            self._leadership.stop()

    def _keep_fleet(self) -> None:
        settings, estate = self._settings, PoolRegistry(self._settings)
        fleet = patiently(
            lambda: FleetLoop(ControllerContext.over(settings, self._ledger, estate)),
            settings.patience_seconds,
        )
        while not self._stop.is_set():
            if self._leadership.sure:
                try:
                    fleet.round()
                    self._note_look()
                except StoreUnavailable as error:
                    log.warning("ledger: %s", error)
            self._stop.wait(settings.heartbeat / 2)

    def _note_look(self) -> None:
        """Once: whoever started this process may go on."""
        if not self._looked:
            self._control.record_round()
            self._looked = True


def main() -> NoReturn:
    """The process. Exit status 0 after SIGTERM, 1 after an error; it is meant to be restarted."""
    configure_logging("controller")
    status = 0
    try:
        controller = Controller(load_settings())
        signal.signal(signal.SIGTERM, lambda _number, _frame: controller.stop())
        signal.signal(signal.SIGINT, lambda _number, _frame: controller.stop())
        controller.run()
    except VcasgdError as error:
        status = exit_status(error)
    logging.shutdown()
    # Ray's own farewell would wait for a head that is dead
    os._exit(status)
