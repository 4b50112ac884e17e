"""Liveness probe of a server that ends endless scripts.

While a script runs for longer than ``busy-reply-threshold`` (5 s by default), a server answers
``BUSY`` to everybody, for as long as the script runs. Workers can run only scripts whose loops are
bounded, so this is the second line of defense.
"""

from __future__ import annotations

import logging
import threading

from vcasgd.errors import StoreError, StoreUnavailable
from vcasgd.store.connection import RedisClient

log = logging.getLogger(__name__)

#: Seconds between two probes.
PROBE_SECONDS = 1.0


class Watchdog(threading.Thread):
    """Thread that probes a server until the process ends. ``name`` is the server's, for the log."""

    def __init__(self, server: RedisClient, name: str) -> None:
        super().__init__(name=f"watchdog-{name}", daemon=True)
        self._server = server
        self._server_name = name
        self._pause = threading.Event()

    def run(self) -> None:
        while not self._pause.wait(PROBE_SECONDS):
            try:
                self._probe()
            except Exception:
                # A probe that stops is none.
                log.exception("probe of the %s", self._server_name)

    def _probe(self) -> None:
        try:
            self._server.ping()
        except StoreUnavailable:
            self._kill_script()
        except StoreError as error:
            log.warning("%s: %s", self._server_name, error)

    def _kill_script(self) -> None:
        """Kill the running script, if the server is busy with one that has not written yet."""
        try:
            self._server.execute_command("SCRIPT KILL")
        except StoreUnavailable:
            return  # The server is down or frozen.
        except StoreError as error:
            if "UNKILLABLE" in error.message:
                log.error("%s: blocked by a script: %s", self._server_name, error)
            return
        log.error("%s: killed a script that blocked it", self._server_name)
