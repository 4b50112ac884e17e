"""The weight of updates in one shard, as the controller has it by the newest evaluations."""

from __future__ import annotations

import time

from vcasgd.parameter_server.model_state import ModelState
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.tuning import Tunings

#: between two looks
LOOK_SECONDS = 0.5


class UpdateWeight:
    """Of a job that wants it; for others it does nothing."""

    def __init__(self, ledger: RedisClient, job: JobRecord) -> None:
        self._tunings = Tunings(ledger, job.id) if job.spec.tuning.mixing else None
        self._looked_at = float("-inf")

    def follow(self, model: ModelState) -> None:
        """Raises :class:`~vcasgd.errors.StoreUnavailable`; then the weight stays as it was."""
        if self._tunings and time.monotonic() - self._looked_at >= LOOK_SECONDS:
            model.factor = self._tunings.read().mixing
            self._looked_at = time.monotonic()
