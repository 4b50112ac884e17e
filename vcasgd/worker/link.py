"""A worker's line to one shard of its job: what it pushed there, and the shard's newest part.

The training thread asks, and never talks to the server itself: all calls are made by threads of
the link, so a store node that is slow or dead delays nothing but its own shard.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from vcasgd.errors import SnapshotMissing, StoreDenied, StoreError, StoreFull, StoreUnavailable
from vcasgd.learning.shards import ShardRange
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.snapshot import Snapshot
from vcasgd.store.tensors.snapshots import Snapshots
from vcasgd.store.tensors.updates import UpdateSender
from vcasgd.worker.outbox import MOST_UNAPPLIED, Outbox
from vcasgd.worker.serial_executor import SerialExecutor

#: what passes by itself, or is mended by others
PASSING = (StoreUnavailable, StoreDenied, StoreFull, SnapshotMissing)
#: while waiting for a commit, somebody may have other reasons to go on; well below the time
#: after which a node counts as late
NEWS_SECONDS = 0.2
#: a prefetch begins so many times earlier than the last fetch would have had to
FETCH_MARGIN = 1.5


class Link:
    """Owned by the training thread; :meth:`close` must be called.

    A future that a method returns is done when the server has answered, or does not: then
    :attr:`trouble` says why. It raises only what does not pass by itself.
    """

    def __init__(
        self, node: RedisClient, job: str, part: ShardRange, key: str | None = None
    ) -> None:
        """``key``: signs the headers of updates."""
        keys = TensorKeys(job, part.shard)
        self.part = part
        self._snapshots = Snapshots(node, keys)
        self._sender = UpdateSender(node, keys, key)
        self.outbox = Outbox(self._sender)
        self._lane = SerialExecutor(f"shard-{part.shard}")
        #: version and writer of what the learner's base holds of this shard
        self.base: tuple[int, int] | None = None
        #: why the last call failed, None where it did not
        self.trouble: StoreError | None = None
        self._fetched: Snapshot | None = None
        self._fetch_seconds = 0.0
        self._hurry = threading.Event()
        self._last: Future[Any] = Future()
        self._last.set_result(None)
        self._missed = False

    # -- the training thread's side --------------------------------------------------------------

    @property
    def late(self) -> bool:
        """It was waited for in vain, and has not answered since."""
        return self._missed and not self._last.done()

    def missed(self) -> None:
        """It was waited for in vain."""
        self._missed = True

    def begin(self, subtask: int, epoch: int, size: int, token: int) -> Future[int | None]:
        """As :meth:`~vcasgd.store.tensors.updates.UpdateSender.begin`; None where there is
        trouble."""
        return self._submit(lambda: self._sender.begin(subtask, epoch, size, token))

    def settle(self, *, patiently: bool) -> Future[Any]:
        """Asks what became of the updates. ``patiently``: where the outbox is full, only after
        something was committed; waits at most :data:`NEWS_SECONDS` for it."""
        return self._last_or(lambda: self._look(None, patiently=patiently))

    def refresh(self, out: Tensor, *, again: bool) -> Future[Any]:
        """As :meth:`settle`, and fetches what is newer than the base into ``out``, float32
        [part.floats]. What was prefetched is new enough, unless it is looked for ``again``."""
        if self.has_fetched and not again:
            return self._last
        return self._last_or(lambda: self._look(out))

    def prefetch(self, out: Tensor, needed_at: float) -> None:
        """As :meth:`refresh`, just in time for a moment of :func:`time.monotonic`."""
        if self._last.done():
            self._hurry.clear()
            self._submit(lambda: self._look_in_time(out, needed_at))

    @property
    def has_fetched(self) -> bool:
        """Whether there is something to take."""
        return self._last.done() and self._fetched is not None

    def take(self) -> Snapshot:
        """What was fetched, once; the caller puts its vector into the base."""
        assert self._fetched is not None
        taken, self._fetched = self._fetched, None
        self.base = (taken.meta.version, taken.meta.token)
        return taken

    def close(self) -> None:
        self._hurry.set()
        self._lane.close()
        self.outbox.close()

    def _last_or(self, call: Callable[[], None]) -> Future[Any]:
        """What was asked before and has no answer yet goes on; else the call is made."""
        self._hurry.set()
        return self._submit(call) if self._last.done() else self._last

    def _submit(self, call: Callable[[], Any]) -> Future[Any]:
        self._missed = False
        self._last = self._lane.submit(lambda: self._bearing(call))
        return self._last

    # -- the lane's side -------------------------------------------------------------------------

    def _bearing(self, call: Callable[[], Any]) -> Any:
        try:
            result = call()
        except PASSING as error:
            self.trouble = error
            return None
        self.trouble = None
        return result

    def _look_in_time(self, out: Tensor, needed_at: float) -> None:
        wait = needed_at - FETCH_MARGIN * self._fetch_seconds - time.monotonic()
        if wait > 0:
            self._hurry.wait(wait)
        self._look(None)
        # with the interval's update the outbox is full: what comes now is old after that wait
        if self.outbox.unapplied + 1 < MOST_UNAPPLIED:
            self._look(out)

    def _look(self, out: Tensor | None, *, patiently: bool = False) -> None:
        if patiently and self.outbox.full:
            self._sender.await_news(NEWS_SECONDS)
        newest = self.outbox.look()
        if out is None or newest == self._known:
            return
        # while it is overwritten there is nothing to take
        self._fetched = None
        started = time.monotonic()
        self._fetched = self._snapshots.fetch(out, rounded=True)
        self._fetch_seconds = time.monotonic() - started

    @property
    def _known(self) -> tuple[int, int] | None:
        if self._fetched is not None:
            return self._fetched.meta.version, self._fetched.meta.token
        return self.base
