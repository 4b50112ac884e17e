"""A worker's client for one shard of its job: pushes updates and fetches the shard's snapshots.

The training thread never waits for the network by itself. Each client has two threads, one for
each direction, so a slow or dead store node delays only its own shard:

- The *push* thread sends updates in the order of submission, until each is in the stream.
- The *request* thread asks the server: where a subtask stands, what became of pushed updates, and
  for a newer snapshot. It makes one request after the other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from vcasgd.errors import (
    Fenced,
    SnapshotMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    VcasgdError,
)
from vcasgd.learning.encodings.steps import StepFormat
from vcasgd.learning.shards import ShardRange
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.snapshot import Meta
from vcasgd.store.tensors.snapshot_store import SnapshotStore
from vcasgd.store.tensors.updates import NO_COMMIT, Header, Payload, UpdateSender
from vcasgd.worker.pending_updates import MAX_UNAPPLIED, PendingUpdate, PendingUpdates, Settled

log = logging.getLogger(__name__)

#: Errors that pass without this worker's help.
TRANSIENT = (StoreUnavailable, StoreDenied, StoreFull, SnapshotMissing)
#: Seconds before a failed push is tried again.
RETRY_SECONDS = 0.1
#: Most seconds to wait for a commit. The caller may have to react to something else meanwhile;
#: well below the time after which a node counts as late.
COMMIT_WAIT_SECONDS = 0.2
#: A prefetch starts this many times earlier than the duration of the last fetch requires.
FETCH_MARGIN = 1.5
#: Size of an update up to which a worker has two in the tensors server at a time, so that the
#: parameter server can publish more of them together. A larger one waits in the worker, unless the
#: worker is about to leave, so that the tensors server needs less memory.
PIPELINED_BYTES = 32 << 20
#: Fraction of the longest push that still counts after the next one.
PUSH_DECAY = 0.8
FLOAT32_BYTES = 4
#: Seconds that :meth:`ShardClient.close` waits for the push thread.
CLOSE_SECONDS = 5.0

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
        most_unapplied: int = MAX_UNAPPLIED,
        steps: StepFormat | None = None,
    ) -> None:
        """``key`` signs the headers of updates; ``most_unapplied`` makes the client full; ``steps``
        is the format of the model's steps, None if it is always fetched whole."""
        keys = TensorKeys(job, part.shard)
        self.part = part
        self._most_unapplied = most_unapplied
        self._steps = steps
        self._snapshots = SnapshotStore(node, keys)
        self._sender = UpdateSender(node, keys, key)
        #: Version and writer of this shard in the training thread's base.
        self.base: tuple[int, int] | None = None
        self._dropped = False
        #: :attr:`Meta.rollbacks` and :attr:`Meta.restorations` of that version.
        self.rollbacks = self.restorations = 0
        #: Why the last request failed; None if it succeeded.
        self.trouble: StoreError | None = None
        self._fetched: Meta | None = None
        self._fetch_seconds = 0.0
        #: Makes a prefetch start at once.
        self._hurry = threading.Event()
        self._late = False
        #: The last commit that the request thread waited for.
        self._seen = NO_COMMIT
        #: Holds a request that is being made and the few behind it: a request for the state
        #: joins the one that is under way.
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._last: Future[Any] = Future()
        self._last.set_result(None)
        #: Guards the pending updates, and is notified when they change.
        self._changed = threading.Condition()
        self._pending = PendingUpdates()
        self._closed = self._hurries = False
        #: Seconds from the submission of an update until the server had accepted it, for one in
        #: float32, as a worker's last update is. The longest of the last ones.
        self.push_seconds = 0.0
        #: What ended the push thread; raised in the training thread.
        self._push_error: Exception | None = None
        self._push_thread = self._start(self._push_all, "push")
        self._start(self._make_requests, "requests")

    def _start(self, target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(
            target=target, name=f"shard-{self.part.shard}-{name}", daemon=True
        )
        thread.start()
        return thread

    def close(self) -> None:
        """End the threads. Updates that aren't pushed yet are lost; see :meth:`flush`."""
        self._hurry.set()
        self._requests.put(None)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._push_thread.join(timeout=CLOSE_SECONDS)

    # -- updates -----------------------------------------------------------------------------------

    def submit(self, header: Header, epoch: int, payload: Payload) -> None:
        """Take over an update to push; its payload must not change afterwards. Returns at once."""
        with self._changed:
            self._pending.add(header, epoch, payload)
            self._changed.notify_all()

    def watch(self, subtask: int, epoch: int, size: int) -> None:
        """Watch a subtask that other workers pushed completely, until it is applied."""
        with self._changed:
            self._pending.watch(subtask, epoch, size)

    def forget(self, subtask: int) -> None:
        """Drop a subtask, because its lease was lost or is no longer needed."""
        with self._changed:
            self._pending.forget(subtask)
            self._changed.notify_all()

    def take_settled(self) -> Settled:
        """Return the outcomes of updates since the last call."""
        with self._changed:
            if self._push_error is not None:
                raise self._push_error
            return self._pending.take_settled()

    def take_delays(self) -> list[float]:
        """Return the delays of applied updates; see :meth:`PendingUpdates.take_delays`."""
        with self._changed:
            return self._pending.take_delays()

    def flush(self, seconds: float) -> bool:
        """Wait until all updates are in the stream; False if that takes longer than ``seconds``."""
        with self._changed:
            self._hurries = True
            self._changed.wait_for(
                lambda: self._pending.next_unsent() is None or self._push_error is not None,
                timeout=seconds,
            )
            return self._pending.next_unsent() is None

    def reached(self, subtask: int, token: int) -> int:
        """Return the end of the updates made under a lease, in samples; 0 if there are none."""
        with self._changed:
            return self._pending.reached(subtask, token)

    def subtasks(self) -> frozenset[int]:
        """Return the subtasks that aren't completely applied, or whose outcome isn't taken yet."""
        with self._changed:
            return self._pending.subtasks()

    @property
    def unapplied(self) -> int:
        """Number of own updates that aren't applied yet."""
        with self._changed:
            return self._pending.unapplied

    @property
    def full(self) -> bool:
        """True if the client takes no further update until one is applied."""
        return self.unapplied >= self._most_unapplied

    def counts(self) -> dict[str, int]:
        """Return the counters of the heartbeat."""
        with self._changed:
            pending = self._pending
            return {
                "pushes": pending.sent,
                "pushed_bytes": pending.sent_bytes,
                "pushed_again": pending.sent_again,
                "discarded": pending.discarded,
                "unapplied": pending.unapplied,
            }

    @property
    def fills_up(self) -> bool:
        """True if the next update makes the client :attr:`full`."""
        return self.unapplied + 1 >= self._most_unapplied

    # -- requests ----------------------------------------------------------------------------------

    @property
    def late(self) -> bool:
        """True if the caller stopped waiting for the last request, and it has no answer yet."""
        return self._late and not self._last.done()

    def mark_late(self) -> None:
        """Record that the caller stopped waiting for the last request."""
        self._late = True

    def begin(self, subtask: int, epoch: int, size: int, token: int) -> Future[int | None]:
        """Request :meth:`~vcasgd.store.tensors.updates.UpdateSender.begin`.

        The result is None if there is trouble.
        """
        self._hurry.set()
        return self._request(lambda: self._sender.begin(subtask, epoch, size, token))

    def settle(self, *, patiently: bool = False) -> Future[Any]:
        """Request the outcome of the sent updates, which :meth:`take_settled` then returns.

        ``patiently``: if the client is full, wait for the next commit first, at most
        :data:`COMMIT_WAIT_SECONDS`. The result is the version and the writer of the present
        snapshot.
        """
        return self._join_or_request(lambda: self._check(patiently=patiently))

    def refresh(self, out: Tensor, base: Tensor, *, again: bool) -> Future[Any]:
        """Request what :meth:`settle` does, and fetch a snapshot that is newer than the base.

        The snapshot goes to ``out``, float32 [part.floats]; ``base`` is the present one. A
        prefetched snapshot is new enough unless ``again`` is True.
        """
        if self.has_fetched and not again:
            return self._last
        return self._join_or_request(lambda: self._check_and_fetch(out, base))

    def prefetch(self, out: Tensor, base: Tensor, needed_at: float) -> None:
        """Request what :meth:`refresh` does, just in time for a moment of
        :func:`time.monotonic`. Any later request makes it start at once."""
        if self._last.done():
            self._hurry.clear()
            self._request(lambda: self._fetch_in_time(out, base, needed_at))

    @property
    def lacks_base(self) -> bool:
        """True if nothing was fetched yet, or since :meth:`drop_base`."""
        return self.base is None or self._dropped

    def drop_base(self) -> None:
        """Fetch the next snapshot even if it isn't newer than the base."""
        self._dropped = True

    @property
    def has_fetched(self) -> bool:
        """True if :meth:`take` has a snapshot to return."""
        return self._last.done() and self._fetched is not None

    def take(self) -> Meta:
        """Return the description of the fetched snapshot, once; the caller moves its vector into
        the base."""
        assert self._fetched is not None
        meta, self._fetched = self._fetched, None
        self.base, self._dropped = (meta.version, meta.token), False
        self.rollbacks, self.restorations = meta.rollbacks, meta.restorations
        return meta

    def _join_or_request(self, call: Callable[[], Any]) -> Future[Any]:
        self._hurry.set()
        return self._request(call) if self._last.done() else self._last

    def _request(self, call: Callable[[], Any]) -> Future[Any]:
        self._late = False
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

    def _check(self, *, patiently: bool = False) -> tuple[int, int]:
        """Settle the sent updates; return the present version and its writer."""
        if patiently and self.full:
            self._seen = self._sender.wait_for_commit(COMMIT_WAIT_SECONDS, self._seen)
        with self._changed:
            sent = self._pending.all_sent()
        status = self._sender.status(
            [(update.subtask, update.epoch, update.stop, update.name) for update in sent]
        )
        with self._changed:
            self._pending.on_status(sent, status)
            self._changed.notify_all()
        return status.version

    def _check_and_fetch(self, out: Tensor, base: Tensor) -> None:
        newest, here = self._check(), self._newest_here
        if newest == here:
            return
        if here is not None and self._fetched is None and self._steps is not None:
            out.copy_(base)
        # Nothing can be taken while the vector is overwritten.
        self._fetched = None
        started = time.monotonic()
        if self._steps is None:
            self._fetched = self._snapshots.fetch_rounded(out)
        else:
            self._fetched = self._snapshots.follow(out, here, self._steps)
        self._fetch_seconds = time.monotonic() - started

    def _fetch_in_time(self, out: Tensor, base: Tensor, needed_at: float) -> None:
        wait = needed_at - FETCH_MARGIN * self._fetch_seconds - time.monotonic()
        if wait > 0:
            self._hurry.wait(wait)
        self._check()
        # The interval's own update may fill the client: then the caller waits for a commit, and
        # a snapshot from before that wait is too old.
        if not self.fills_up:
            self._check_and_fetch(out, base)

    @property
    def _newest_here(self) -> tuple[int, int] | None:
        if self._fetched is not None:
            return self._fetched.version, self._fetched.token
        return None if self._dropped else self.base

    # -- push thread -------------------------------------------------------------------------------

    def _push_all(self) -> None:
        try:
            seen, held = NO_COMMIT, 0.0
            while (update := self._next_unsent()) is not None:
                try:
                    self._push(update, held)
                    held = 0.0
                    del update  # It refers to a vector, which may be applied soon.
                except StoreFull:
                    # The next commit makes room.
                    began = time.monotonic()
                    seen = self._wait_for_commit(seen)
                    held += time.monotonic() - began
                except TRANSIENT as error:
                    log.debug("push of subtask %d: %s", update.subtask, error)
                    time.sleep(RETRY_SECONDS)
        except Exception as error:
            log.exception("pushing to shard %d", self.part.shard)
            with self._changed:
                self._push_error = error
                self._changed.notify_all()

    def _next_unsent(self) -> PendingUpdate | None:
        """Wait for an update to push; None once the client is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._pending.next_unsent() is not None)
            return None if self._closed else self._pending.next_unsent()

    def _wait_for_commit(self, seen: bytes) -> bytes:
        try:
            return self._sender.wait_for_commit(COMMIT_WAIT_SECONDS, seen)
        except TRANSIENT:
            time.sleep(RETRY_SECONDS)
            return seen

    def _push(self, update: PendingUpdate, held: float) -> None:
        """Push once. Raises :data:`TRANSIENT` errors if it has to be tried again.

        ``held`` are the seconds for which the update waited for others to be processed.
        """
        assert update.header is not None
        assert update.payload is not None
        with self._changed:
            alone = len(update.payload) > PIPELINED_BYTES and not self._hurries
            after = self._pending.names_before(update) if alone else []
        try:
            pushed = self._sender.push(update.header, update.epoch, update.payload, after)
        except TRANSIENT:
            raise  # They are errors of the store, too.
        except Fenced as error:
            log.info("subtask %d: %s", update.subtask, error)
            self._record(lambda pending: pending.discard(update, rework=False))
        except StoreError:
            log.exception("subtask %d can't be pushed", update.subtask)
            self._record(lambda pending: pending.discard(update, rework=True))
        else:
            if pushed.accepted:
                self._measure(update, len(update.payload), held)
                self._record(lambda pending: pending.on_accepted(update))
            else:
                self._record(lambda pending: pending.on_refused(update, pushed.position))

    def _measure(self, update: PendingUpdate, size: int, held: float) -> None:
        seconds = time.monotonic() - update.submitted_at - held
        whole = seconds * max(1.0, FLOAT32_BYTES * self.part.floats / max(size, 1))
        self.push_seconds = max(whole, PUSH_DECAY * self.push_seconds)

    def _record(self, change: Callable[[PendingUpdates], None]) -> None:
        with self._changed:
            change(self._pending)
            self._changed.notify_all()
