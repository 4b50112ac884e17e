"""Contributions to a job: whose machine each worker runs on, so that its samples are counted."""

from __future__ import annotations

from vcasgd.store.ledger.contributors import Contributors
from vcasgd.store.ledger.joined_machines import PREFIX


class Contributions:
    """Contributors of a job's workers, each read once: the controller records them before."""

    def __init__(self, contributors: Contributors, job: str) -> None:
        self._ledger = contributors
        self._job = job
        #: Worker → contributor.
        self._known: dict[str, str | None] = {}

    def of(self, worker: str) -> str | None:
        """Return the contributor of a worker's machine; None for a machine of the cluster.

        Raises :class:`~vcasgd.errors.StoreUnavailable` while that of a machine that joined can't be
        read.
        """
        if worker not in self._known:
            joined = f".{PREFIX}" in worker
            self._known[worker] = self._ledger.of_worker(self._job, worker) if joined else None
        return self._known[worker]
