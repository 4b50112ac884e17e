"""Keeps the machines: observe → :func:`vcasgd.fleet.plan.decide` → act."""

from __future__ import annotations

import logging
import time

from vcasgd.controller.fleet.act import Actuator
from vcasgd.controller.fleet.context import ControllerContext
from vcasgd.controller.fleet.learners import Learners
from vcasgd.controller.fleet.observe import Observer
from vcasgd.controller.fleet.status import StatusPublisher
from vcasgd.errors import FleetError
from vcasgd.fleet.plan import decide

log = logging.getLogger(__name__)


class FleetLoop:
    """Every action may be carried out twice, and every round may be cut off at any line."""

    def __init__(self, parts: ControllerContext) -> None:
        self._parts = parts
        self._lookout = Observer(parts)
        self._hands = Actuator(parts, self._lookout)
        self._teller = StatusPublisher(parts)
        self._learners = Learners(parts.ledger, parts.settings.heartbeat)

    def round(self) -> None:
        """One observe–decide–act. Raises :class:`~vcasgd.errors.ClusterError` when Ray's head was
        lost."""
        parts = self._parts
        if parts.estate.refresh():
            parts.listing.forget_prices()
        parts.guard.know(parts.estate.pools)
        self._hands.serve_requests()
        now = time.time()
        try:
            state = self._lookout.look(now)
        except FleetError as error:
            log.warning("nothing is decided: %s", error)
            return
        self._teller.show(state)
        for action in decide(state, now):
            self._hands.act(action, state)
        # after it is known which first workers have to leave
        for action in self._learners.look(state, self._lookout.further, now):
            self._hands.act(action, state)
        self._hands.kill_lingering()
