"""A worker's client for one shard of its job: pushes updates and fetches the shard's snapshots.

The training thread never waits for the network by itself. Each client has two threads, one for
each direction, so a slow or dead store node delays only its own shard:

- The *push* thread, of :class:`~vcasgd.worker.push_queue.PushQueue`, sends updates.
- The *request* thread asks the server: where a subtask stands, what became of pushed updates, and
  for a newer snapshot. It makes one request after the other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from vcasgd.errors import (
    StoreError,
    VcasgdError,
)
from vcasgd.learning.encodings.steps import StepFormat
from vcasgd.learning.shards import ShardRange
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.snapshot import Meta
from vcasgd.store.tensors.snapshot_store import ONLY_CHUNK, SnapshotStore
from vcasgd.store.tensors.updates import (
    NO_COMMIT,
    SMALL_SNAPSHOT,
    Pushed,
    UpdateSender,
    UpdateStatus,
)
from vcasgd.worker.pending_updates import MAX_UNAPPLIED, PendingUpdate
from vcasgd.worker.push_queue import COMMIT_WAIT_SECONDS, FLOAT32_BYTES, TRANSIENT, PushQueue

log = logging.getLogger(__name__)

#: Number of fetches of which the fastest tells whether a node is slow. Others may be slow because
#: of what else the machine did.
FETCH_TIMES = 3
#: A prefetch starts this many times earlier than the duration of the last fetch requires.
FETCH_MARGIN = 1.5
#: Version and writer of no snapshot.
NO_VERSION = (-1, -1)

#: Returns memory for a shard's part of the model, float32 [part.floats]; None if there is none.
Memory = Callable[[], Tensor | None]
#: A request, and where its result goes.
_Request = tuple[Callable[[], Any], Future[Any]]


class ShardClient:
    """Owned by the training thread, which must call :meth:`close`.

    A request returns a future that is done as soon as the server answered or failed to answer;
    :attr:`trouble` is the reason in the second case. The future raises only errors that don't
    pass by themselves.
    """

    def __init__(
        self,
        node: RedisClient,
        job: str,
        part: ShardRange,
        key: str | None = None,
        *,
        max_unapplied: int = MAX_UNAPPLIED,
        steps: StepFormat | None = None,
    ) -> None:
        """``key`` signs the headers of updates; ``max_unapplied`` makes the queue full; ``steps``
        is the format of the model's steps, None if it is always fetched whole."""
        keys = TensorKeys(job, part.shard)
        self.part = part
        self._steps = steps
        small = steps is None and part.floats * FLOAT32_BYTES <= SMALL_SNAPSHOT
        #: Chunk of a snapshot that comes with the status of updates.
        self._chunk = ONLY_CHUNK if small else ""
        self._snapshots = SnapshotStore(node, keys)
        self._sender = UpdateSender(node, keys, key)
        #: Version and writer of this shard in the training thread's base.
        self.base: tuple[int, int] | None = None
        #: Number of submitted updates that it contains, or that no version will ever contain.
        self.settled = 0
        self._dropped = False
        #: Guards :attr:`late` and that the base is overwritten.
        self._claims = threading.Lock()
        #: :attr:`Meta.rollbacks` and :attr:`Meta.restorations` of that version.
        self.rollbacks = self.restorations = 0
        #: Why the last request failed; None if it succeeded.
        self.trouble: StoreError | None = None
        self._fetched: Meta | None = None
        self._fetched_in_base = False
        self._fetched_settled = 0
        #: True while a snapshot is fetched into memory of its own.
        self._fetching = False
        self._fetch_times: deque[float] = deque(maxlen=FETCH_TIMES)
        #: Makes a prefetch start at once.
        self._hurry = threading.Event()
        self._late = False
        #: True if :meth:`await_room` has just looked for a newer snapshot.
        self._current = False
        #: The last commit that the request thread waited for.
        self._seen = NO_COMMIT
        #: Holds a request that is being made and the few behind it: a request for the state
        #: joins the one that is under way.
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._last: Future[Any] = Future()
        self._last.set_result(None)
        #: Updates that are not applied yet.
        self.updates = PushQueue(
            self._sender, shard=part.shard, floats=part.floats, max_unapplied=max_unapplied
        )
        threading.Thread(
            target=self._make_requests, name=f"shard-{part.shard}-requests", daemon=True
        ).start()

    def close(self) -> None:
        """End the threads. Updates that aren't pushed yet are lost; see :meth:`PushQueue.flush`."""
        self._hurry.set()
        self._requests.put(None)
        self.updates.close()

    # -- requests ----------------------------------------------------------------------------------

    @property
    def late(self) -> bool:
        """True if the caller stopped waiting for the last request, and it has no answer yet."""
        return self._late and not self._last.done()

    def mark_late(self) -> None:
        """Record that the caller stopped waiting for the last request."""
        with self._claims:
            self._late = True

    def claim_base(self) -> bool:
        """Let the request thread overwrite the base, unless the caller stopped waiting for that.

        The base is lost then, until the fetch has succeeded.
        """
        with self._claims:
            if self._late:
                return False
            self._dropped = True
            return True

    def begin(self, subtask: int, epoch: int, size: int, token: int) -> Future[int | None]:
        """Request :meth:`~vcasgd.store.tensors.updates.UpdateSender.begin`.

        The result is None if there is trouble.
        """
        self._hurry.set()
        return self._request(lambda: self._sender.begin(subtask, epoch, size, token))

    def settle(self) -> Future[Any]:
        """Request the outcome of the sent updates, for :meth:`PushQueue.take_settled`.

        The result is the version and the writer of the present snapshot.
        """
        return self._join_or_request(lambda: self._check().version)

    def await_room(self, out: Memory, base: Tensor) -> Future[Any]:
        """Request what :meth:`settle` does; if the queue is full, after the next commit, for which
        it waits for at most :data:`COMMIT_WAIT_SECONDS`.

        If there is room then, fetch a newer snapshot as :meth:`refresh` does.
        """
        return self._join_or_request(lambda: self._await_room(out, base))

    def refresh(self, out: Memory, base: Tensor, *, again: bool) -> Future[Any]:
        """Request what :meth:`settle` does, and fetch a snapshot that is newer than the base.

        ``out`` returns memory for the snapshot, float32 [part.floats]; it is called only if there
        is a newer one. ``base`` is the present one; ``out`` may return it after
        :meth:`claim_base`. A prefetched snapshot is new enough unless ``again`` is True; one of
        :meth:`await_room` is.
        """
        current, self._current = self._current, False
        if (self.has_fetched and not again) or (current and self._last.done()):
            return self._last
        return self._join_or_request(lambda: self._check_and_fetch(out, base))

    def prefetch(self, out: Memory, base: Tensor, needed_at: float) -> None:
        """Request what :meth:`refresh` does, just in time for a moment of
        :func:`time.monotonic`. Any later request makes it start at once."""
        # The interval's own update alone may make the client full. Then the caller waits for a
        # commit, and a snapshot from before that wait is too old.
        if self._last.done() and not self.updates.takes_one:
            self._hurry.clear()
            self._request(lambda: self._fetch_in_time(out, base, needed_at))

    @property
    def lacks_last(self) -> bool:
        """True if the base doesn't contain the last submitted update, but a later one will."""
        return self.updates.submitted > self.settled

    @property
    def lacks_base(self) -> bool:
        """True if nothing was fetched yet, or since :meth:`drop_base`."""
        return self.base is None or self._dropped

    def drop_base(self) -> None:
        """Fetch the next snapshot even if it isn't newer than the base."""
        self._dropped = True

    @property
    def follows_steps(self) -> bool:
        """True if it fetches the steps from its base to the present version, if possible."""
        return self._steps is not None

    @property
    def has_fetched(self) -> bool:
        """True if :meth:`take` has a snapshot to return."""
        return self._last.done() and self._fetched is not None

    @property
    def fetch_seconds(self) -> float:
        """Seconds of the fastest of the last fetches; 0 before the first one."""
        return min(self._fetch_times, default=0.0)

    @property
    def is_fetching(self) -> bool:
        """True while a newer snapshot is fetched, which needs the base no more."""
        return self._fetching

    def take(self) -> Meta:
        """Return the description of the fetched snapshot, once; the caller moves its vector into
        the base."""
        assert self._fetched is not None
        meta, self._fetched = self._fetched, None
        self.base, self._dropped = (meta.version, meta.token), False
        self.settled = self._fetched_settled
        self.rollbacks, self.restorations = meta.rollbacks, meta.restorations
        return meta

    def _join_or_request(self, call: Callable[[], Any]) -> Future[Any]:
        self._hurry.set()
        return self._request(call) if self._last.done() else self._last

    def _request(self, call: Callable[[], Any]) -> Future[Any]:
        self._late = self._current = False
        self._last = Future()
        self._requests.put((call, self._last))
        return self._last

    # -- request thread ----------------------------------------------------------------------------

    def _make_requests(self) -> None:
        while (request := self._requests.get()) is not None:
            self._answer(*request)
            del request  # It refers to vectors.

    def _answer(self, call: Callable[[], Any], answer: Future[Any]) -> None:
        try:
            result = call()
        except TRANSIENT as error:
            self.trouble = error
            answer.set_result(None)
        except Exception as error:
            if not isinstance(error, VcasgdError):
                # A prefetch that fails may have no reader.
                log.exception("request to shard %d", self.part.shard)
            answer.set_exception(error)
        else:
            self.trouble = None
            answer.set_result(result)

    def _check(self, newer_than: tuple[int, int] | None = None) -> UpdateStatus:
        """Settle the sent updates."""
        sent = self.updates.sent()
        chunk = self._chunk if newer_than is not None else ""
        status = self._sender.status(_asked(sent), newer_than, chunk)
        self.updates.on_status(sent, status)
        return status

    def _check_after_commit(self) -> UpdateStatus:
        """Settle the updates after the next commit, for which it waits for a while."""
        newest = self._newest_here or NO_VERSION
        if not self.updates.takes_one:
            # Waits for any of them; the last one may not be in the stream yet.
            self._seen = self._sender.wait_for_commit(COMMIT_WAIT_SECONDS, self._seen)
            return self._check(newest)
        if not self.updates.await_accepted(COMMIT_WAIT_SECONDS):
            return self._check(newest)
        sent = self.updates.sent()
        self._seen, status = self._sender.status_after_commit(
            COMMIT_WAIT_SECONDS, self._seen, _asked(sent), newest, self._chunk
        )
        self.updates.on_status(sent, status)
        return status

    def _await_room(self, out: Memory, base: Tensor) -> None:
        waits = self.updates.full
        status = self._check_after_commit() if waits else self._check()
        if waits and not self.updates.full:
            self._fetch(status, out, base)
            self._current = True

    def _check_and_fetch(self, out: Memory, base: Tensor) -> None:
        self._fetch(self._check(self._newest_here or NO_VERSION), out, base)

    def _fetch(self, status: UpdateStatus, out: Memory, base: Tensor) -> None:
        newest = status.meta
        if newest is None:
            return
        here, memory = self._newest_here, out()
        if memory is None:
            return
        in_base = memory is base
        is_newest_in_base = self._fetched is None or self._fetched_in_base
        if self.follows_steps and here is not None and is_newest_in_base and not in_base:
            memory.copy_(base)
        # Nothing can be taken while the vector is overwritten.
        self._fetched, self._fetched_in_base = None, in_base
        self._fetched_settled = self.updates.settled
        started = time.monotonic()
        self._fetching = True
        try:
            if self._steps is None:
                self._fetched = self._snapshots.fetch_rounded(memory, newest, status.content)
            else:
                self._fetched = self._snapshots.follow(memory, here, self._steps, newest)
        finally:
            self._fetching = False
        self._fetch_times.append(time.monotonic() - started)

    def _fetch_in_time(self, out: Memory, base: Tensor, needed_at: float) -> None:
        last = self._fetch_times[-1] if self._fetch_times else 0.0
        wait = needed_at - FETCH_MARGIN * last - time.monotonic()
        if wait > 0:
            self._hurry.wait(wait)
        self._check()
        # See prefetch().
        if not self.updates.fills_up:
            self._check_and_fetch(out, base)

    @property
    def _newest_here(self) -> tuple[int, int] | None:
        if self._fetched is not None:
            return self._fetched.version, self._fetched.token
        return None if self._dropped else self.base


def _asked(sent: Sequence[PendingUpdate]) -> list[Pushed]:
    return [(update.subtask, update.epoch, update.stop, update.name) for update in sent]
