"""Shares a worker's second moments with workers that join later, beside the training."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from torch import Tensor

from vcasgd.errors import StoreError
from vcasgd.store.connection import RedisClient
from vcasgd.store.tensors.sharded import SharedMoments
from vcasgd.threads import Background, DaemonThreads
from vcasgd.worker.member import SHARING_SECONDS, Member

log = logging.getLogger(__name__)

#: Least time between two writes, as a multiple of what the last one took.
REST = 100.0


class MomentsExchange:
    """Owned by the training thread.

    Training never depends on it: what can't be written or read is left out.
    """

    def __init__(self, nodes: Sequence[RedisClient], job: str, worker: str) -> None:
        self._nodes = nodes
        self._job = job
        self._worker = worker
        self._store: SharedMoments | None = None
        self._writing = Background[float](DaemonThreads(1, "moments"))
        self._rest = SHARING_SECONDS
        self._next_at = 0.0

    def open(self, nodes: int) -> None:
        """Use the job's store nodes, once their number is known; later calls do nothing."""
        if self._store is None:
            self._store = SharedMoments(self._nodes, self._job, nodes)

    def adopt(self, member: Member, rollbacks: int) -> None:
        """Give a new optimizer the second moments that another worker shared, if there are any."""
        count = member.lacking
        if self._store is None or not count:
            return
        try:
            shared = self._store.read(count, rollbacks)
        except StoreError as error:
            log.info("second moments can't be read: %s", error)
            return
        if shared is None:
            return
        moments, made = shared
        if member.adopt(moments, made):
            log.info("took over second moments of %d steps", made)
        else:
            log.warning("second moments are not valid; training starts with new ones")

    def share(self, member: Member, rollbacks: int) -> None:
        """Write second moments in the background if it is time, and this worker's turn."""
        store, writing = self._store, self._writing
        if store is None or time.monotonic() < self._next_at or not member.can_share:
            return
        if writing.running:
            return
        try:
            if (seconds := writing.take()) is not None:
                self._rest = max(SHARING_SECONDS, REST * seconds)
            self._next_at = time.monotonic() + self._rest
            if store.take_turn(self._worker, self._rest):
                moments, made = member.shared()
                writing.start(lambda: _write(store, moments, made, rollbacks))
        except StoreError as error:
            log.info("second moments can't be shared: %s", error)


def _write(store: SharedMoments, moments: Tensor, made: int, rollbacks: int) -> float:
    """Return the duration in seconds."""
    started = time.monotonic()
    store.write(moments, made, rollbacks)
    return time.monotonic() - started
