"""Keeps the machines: observe → :func:`vcasgd.fleet.plan.decide` → act."""

from __future__ import annotations

import time

from vcasgd.fleet.plan import decide
from vcasgd.fleet.providers.base import Provider
from vcasgd.runtime.chronicle import Chronicle
from vcasgd.runtime.controller.acting import Hands
from vcasgd.runtime.controller.observing import Lookout
from vcasgd.runtime.controller.telling import Teller
from vcasgd.runtime.crashes import Crashes
from vcasgd.settings import Settings
from vcasgd.store.connection import Client
from vcasgd.store.jobs import Jobs
from vcasgd.store.servers import Control


class FleetLoop:
    """Every action may be carried out twice, and every round may be cut off at any line."""

    def __init__(self, settings: Settings, ledger: Client, providers: dict[str, Provider]) -> None:
        jobs = Jobs(ledger)
        crashes = Crashes(jobs)
        chronicle = Chronicle(Control(ledger), jobs)
        self._lookout = Lookout(settings, ledger, providers, crashes)
        self._hands = Hands(settings, ledger, providers, self._lookout, chronicle, crashes)
        self._teller = Teller(settings, jobs, chronicle)

    def round(self) -> None:
        """One observe–decide–act. Raises :class:`~vcasgd.errors.ClusterError` when Ray's head was
        lost."""
        self._hands.serve_requests()
        now = time.time()
        state = self._lookout.look(now)
        self._teller.show(state)
        for action in decide(state, now):
            self._hands.act(action)
        self._hands.kill_lingering()
