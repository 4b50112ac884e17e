"""Removal of what ended jobs have left on the tensors servers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from vcasgd.controller.leadership import Leadership
from vcasgd.errors import StoreError
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.tensors.snapshot_index import delete_job, scan_jobs
from vcasgd.threads import EssentialThread

log = logging.getLogger(__name__)

#: Seconds between two calls to each tensors server, and after all keys of all servers.
PAUSE_SECONDS = 1.0
REST_SECONDS = 5.0


class Sweeper(EssentialThread):
    """Thread that looks through the keys of the tensors servers, a few at a time, without end.

    A job that ends while a controller runs is cleaned up by the job loop. This thread finds the
    others: jobs that ended while no controller ran, and data that a worker or a failover brought
    back. Data stays while it is younger than ``grace_seconds`` or its job is not in this ledger.
    """

    def __init__(
        self,
        jobs: Jobs,
        nodes: Sequence[RedisClient],
        leadership: Leadership,
        grace_seconds: float,
    ) -> None:
        super().__init__("sweeper")
        self._jobs = jobs
        self._nodes = nodes
        self._leadership = leadership
        self._grace_seconds = grace_seconds
        self._cursors = [0] * len(nodes)
        #: Ended jobs with data, and since when by :func:`time.monotonic`.
        self._found_at: dict[str, float] = {}
        self._stopped = threading.Event()

    def work(self) -> None:
        """Sweep while this controller is the leader, until :meth:`stop`."""
        while not self._stopped.wait(PAUSE_SECONDS if any(self._cursors) else REST_SECONDS):
            for node in range(len(self._nodes)):
                if self._leadership.sure and not self._stopped.is_set():
                    self._sweep(node)

    def stop(self) -> None:
        """End :meth:`work`."""
        self._stopped.set()

    def _sweep(self, node: int) -> None:
        try:
            self._cursors[node], found = scan_jobs(self._nodes[node], self._cursors[node])
            for job in found:
                if self._jobs.is_over(job):
                    self._delete_job(job)
        except StoreError as error:
            log.warning("store node %d: %s", node, error)

    def _delete_job(self, job: str) -> None:
        found_at = self._found_at.setdefault(job, time.monotonic())
        if time.monotonic() - found_at < self._grace_seconds:
            return
        log.info("%s has ended; its data is deleted from the tensors servers", job)
        delete_job(self._nodes, job)
        del self._found_at[job]
