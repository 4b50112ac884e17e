"""A worker's link to one shard of its job: push, poll, fetch.

The training thread never waits for the network by itself. Each link has two threads, one for
each direction, so a slow or dead store node delays only its own shard:

- The *push* thread sends updates in the order of submission, until each is in the stream.
- The *request* thread asks the server: where a subtask stands, what became of pushed updates, and
  for a newer snapshot. It makes one request after the other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from torch import Tensor

from vcasgd.backoff import backoff, jittered
from vcasgd.errors import (
    Fenced,
    SnapshotMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    VcasgdError,
)
from vcasgd.learning.encodings.payload import EncodedVector
from vcasgd.learning.encodings.steps import StepFormat
from vcasgd.learning.shards import ShardRange
from vcasgd.learning.vector import Floats, copy_floats
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.snapshot import Meta
from vcasgd.store.tensors.snapshot_store import ONLY_CHUNK, SnapshotStore
from vcasgd.store.tensors.updates import (
    NO_COMMIT,
    SMALL_SNAPSHOT,
    Payload,
    Pushed,
    UpdateSender,
    UpdateStatus,
)
from vcasgd.worker.update_queue import MAX_UNAPPLIED, QueuedUpdate, UpdateQueue
from vcasgd.worker.vectors import Vector, single_threaded

log = logging.getLogger(__name__)

#: Errors that pass without this worker's help.
TRANSIENT = (StoreUnavailable, StoreDenied, StoreFull, SnapshotMissing)
#: Seconds before a failed push is tried again, and the most that doubling makes of them: a server
#: that is back is noticed within a second.
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 1.0
#: Most seconds to wait for a commit. The caller may have to react to something else meanwhile;
#: well below the time after which a node counts as late.
COMMIT_WAIT_SECONDS = 0.2
#: Size of an update up to which a worker has two in the tensors server at a time, so that the
#: parameter server can publish more of them together. A larger one waits in the worker, unless the
#: worker is about to leave, so that the tensors server needs less memory.
PIPELINED_BYTES = 32 << 20
#: Fraction of the longest push that still counts after the next one.
PUSH_DECAY = 0.8
FLOAT32_BYTES = 4
#: A fetch for a given moment starts this many times earlier than the last one took.
FETCH_MARGIN = 1.5
#: Version and writer of no snapshot.
NO_VERSION = (-1, -1)
#: Seconds that :meth:`ShardLink.close` waits for the push thread.
CLOSE_SECONDS = 5.0

_T = TypeVar("_T")
#: A request, and where its result goes.
_Request = tuple[Callable[[], Any], Future[Any]]


class ShardLink:
    """Owned by the training thread, which must call :meth:`close`.

    A request returns a future that is done as soon as the server answered or failed to answer;
    :attr:`last_error` is the reason in the second case. The future raises only errors that don't
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
        vector_slots: threading.Semaphore | None = None,
    ) -> None:
        """``key`` signs the headers of updates; ``max_unapplied`` makes the queue full; ``steps``
        is the format of the model's steps, None if it is always fetched whole; ``vector_slots``
        limit the links that use vectors at a time."""
        keys = TensorKeys(job, part.shard)
        self.part = part
        self.steps, self._vector_slots = steps, vector_slots or threading.Semaphore(2)
        small = steps is None and part.floats * FLOAT32_BYTES <= SMALL_SNAPSHOT
        #: Chunk of a snapshot that comes with the status of updates.
        self._chunk = ONLY_CHUNK if small else ""
        self._snapshots = SnapshotStore(node, keys)
        self._sender = UpdateSender(node, keys, key)
        #: Updates that are not applied yet.
        self.updates = UpdateQueue(max_unapplied)
        #: Seconds from the submission of an update until the server had accepted it, for one in
        #: float32, as a worker's last update is. The longest of the last ones.
        self.push_seconds = 0.0
        #: The same seconds of the last update, as it was encoded.
        self.last_push_seconds = 0.0
        #: True once the worker is about to leave, so that no update waits for another one.
        self._flushing = False
        #: Pushes in a row that failed, and all that the server refused.
        self._failures = self.denied = 0

        #: Version and writer of this shard in the training thread's base, and the number of
        #: submitted updates that it contains, or that no version will ever contain.
        self.version: tuple[int, int] | None = None
        self.settled = 0
        #: True if the server has lost an update that is pushed again, and applied a later one, so
        #: that the number doesn't tell which ones a version contains.
        self.overtaken = False
        #: :attr:`Meta.rollbacks` and :attr:`Meta.restorations` of that version.
        self.rollbacks = self.restorations = 0
        #: When the version was published, by the clock of its server.
        self.published_at = 0.0
        #: When the server was asked last, and when it answered, by :func:`time.monotonic`.
        self.asked_at = self.answered_at = 0.0
        #: Why the last request failed; None if it succeeded.
        self.last_error: StoreError | None = None
        #: Answer to the last poll, if it describes a snapshot that isn't fetched yet.
        self._newer: UpdateStatus | None = None
        #: True if the last poll waited until there was room, and nothing was asked for since.
        self.has_waited = False
        self._fetched: Meta | None = None
        self._fetched_settled = 0
        self._fetch_seconds = 0.0
        #: Makes a fetch for a later moment start at once.
        self._hurry = threading.Event()
        self._late = False
        #: The last commit that the request thread waited for.
        self._seen = NO_COMMIT
        #: Holds a request that is being made and the few behind it: a poll joins the request that
        #: is under way.
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._last: Future[Any] = Future()
        self._last.set_result(None)
        self._push_thread = single_threaded(self._push_all, f"shard-{part.shard}-push")
        single_threaded(self._make_requests, f"shard-{part.shard}-requests")

    def close(self) -> None:
        """End the threads. Updates that aren't pushed yet are lost; see :meth:`flush`."""
        self._hurry.set()
        self._requests.put(None)
        self.updates.close()
        self._push_thread.join(timeout=CLOSE_SECONDS)

    @property
    def idle(self) -> bool:
        """True if no request is under way, and there is no snapshot to :meth:`take`."""
        return self._last.done() and self._fetched is None

    @property
    def fetched(self) -> bool:
        """True if no request is under way, and there is a snapshot to :meth:`take`."""
        return self._last.done() and self._fetched is not None

    @property
    def late(self) -> bool:
        """True if the caller stopped waiting for the last request, and it has no answer yet."""
        return self._late and not self._last.done()

    def mark_late(self) -> None:
        """Record that the caller stopped waiting for the last request."""
        self._late = True

    # -- push --------------------------------------------------------------------------------------

    def header(
        self, fields: Mapping[str, Any], rollbacks: int, payload: EncodedVector | None = None
    ) -> Header:
        """Return the header of an update that was trained from the base, after ``rollbacks``.

        ``fields`` are the others, some of which only shard 0 has. What describes the payload
        follows if that is made later.
        """
        assert self.version is not None
        codec, size = (payload.codec, len(payload)) if payload is not None else ("", 0)
        own = {"shard": self.part.shard, "base": self.version[0], "rollbacks": rollbacks,
               "codec": codec, "size": size}  # fmt: skip
        if self.part.shard:
            own |= {"integers": "", "logged": ()}
        return Header(**{**fields, **own})

    def push(
        self,
        header: Header,
        epoch: int,
        payload: Payload | Callable[[], EncodedVector],
        *vectors: Vector,
    ) -> None:
        """Push an update in the background; see :meth:`UpdateQueue.add`."""
        self.updates.add(header, epoch, payload, *vectors)

    def flush(self, seconds: float) -> bool:
        """Wait until all updates are in the stream; False if that takes longer than ``seconds``."""
        self._flushing = True
        return self.updates.await_accepted(seconds)

    def check(self) -> None:
        """Raise the error of the last request, unless it passes by itself; it has an answer."""
        self._last.result()

    @property
    def lacks_last(self) -> bool:
        """True if the base doesn't contain the last submitted update, but a later one will."""
        return self.updates.added > self.settled and not self.overtaken

    # -- poll, fetch -------------------------------------------------------------------------------

    def begin(self, subtask: int, epoch: int, size: int, token: int) -> Future[int | None]:
        """Request :meth:`~vcasgd.store.tensors.updates.UpdateSender.begin`.

        The result is None after an error.
        """
        self._hurry.set()

        def begin() -> int:
            return self._sender.begin(subtask, epoch, size, token)

        if self._last.done() or self._late:
            return self._request(begin)
        # A large snapshot may be under way.
        answer: Future[int | None] = Future()
        name = f"shard-{self.part.shard}-begin"
        threading.Thread(target=self._make, args=(begin, answer), name=name, daemon=True).start()
        return answer

    def poll(self, *, newer: bool = False, wait: bool = False) -> Future[Any]:
        """Ask what became of the pushed updates; joins a request that is under way.

        ``newer`` also asks for a snapshot that is newer than the newest one here; see
        :attr:`sees_newer`. ``wait``: if the queue is full, ask both after the next commit, for
        which it waits for at most :data:`COMMIT_WAIT_SECONDS`. The result is the version and the
        writer of the present snapshot.
        """
        self._hurry.set()
        if not self._last.done():
            return self._last
        return self._request(lambda: (self._await_room() if wait else self._poll(newer)).version)

    @property
    def sees_newer(self) -> bool:
        """True if the last poll found a newer snapshot than the newest one here."""
        return self._last.done() and self._newer is not None

    def fetch(self, out: Floats, base: Floats, *, needed_at: float | None = None) -> Future[Any]:
        """Fetch the snapshot that the last poll found into ``out``, float32 [part.floats].

        ``base`` is the present one, which doesn't change. ``out`` has the fetched snapshot already
        if there is one that isn't taken. With ``needed_at``, a moment of :func:`time.monotonic`,
        polls and fetches just in time; any later request makes it start at once.
        """
        if needed_at is None:
            return self._request(lambda: self._fetch(out, base))
        self._hurry.clear()
        return self._request(lambda: self._fetch_in_time(out, base, needed_at))

    def watch(self, out: Floats, base: Floats, *, adopts: bool) -> Future[Any]:
        """Wait for the next commit, at most :data:`COMMIT_WAIT_SECONDS`, poll, and :meth:`fetch`.

        Unless the caller ``adopts`` what that found; see :meth:`adopt`.
        """
        return self._request(lambda: self._watch_and_fetch(out, base, adopts=adopts))

    def run(self, call: Callable[[], Any]) -> Future[Any]:
        """Call a function that makes no request, in the thread that makes requests."""
        return self._request(lambda: self.with_vector_slot(call))

    def with_vector_slot(self, call: Callable[[], _T]) -> _T:
        """Call a function that uses vectors when fewer than so many links do."""
        with self._vector_slots:
            return call()

    def adopt(self) -> Meta | None:
        """Take the snapshot that the last poll found without a fetch, if it has only this worker's
        updates more than the newest one here; return its description."""
        newer = self._own_newer()
        if newer is None:
            return None
        meta, own = newer
        self._fetched, self._newer = meta, None
        self._fetched_settled = self.settled + own
        return self.take()

    def _own_newer(self) -> tuple[Meta, int] | None:
        """Return what :meth:`adopt` would take, with its number of updates."""
        meta = self._newer.meta if self._newer is not None else None
        if meta is None or meta.stepped or meta.rollbacks != self.rollbacks:
            return None
        own, (version, token) = self.updates.settled - self.settled, self.version or NO_VERSION
        # The first model is a worker's.
        same = meta.token == token or version == 0
        return (meta, own) if same and meta.version == version + own else None

    def take(self) -> Meta:
        """Return the description of the fetched snapshot, once; the caller takes its vector."""
        assert self._fetched is not None
        assert self._last.done()
        meta, self._fetched = self._fetched, None
        self.version, self.settled = (meta.version, meta.token), self._fetched_settled
        self.rollbacks, self.restorations = meta.rollbacks, meta.restorations
        self.published_at = meta.created_at
        return meta

    def _request(self, call: Callable[[], Any]) -> Future[Any]:
        self._late = self.has_waited = False
        self._last = Future()
        self._requests.put((call, self._last))
        return self._last

    # -- request thread ----------------------------------------------------------------------------

    def _make_requests(self) -> None:
        while (request := self._requests.get()) is not None:
            self._make(*request)
            # It holds vectors.
            del request

    def _make(self, call: Callable[[], Any], answer: Future[Any]) -> None:
        try:
            result = call()
            self.answered_at = time.monotonic()
        except TRANSIENT as error:
            self.last_error = error
            answer.set_result(None)
        except Exception as error:
            if not isinstance(error, VcasgdError):
                # A fetch ahead of its time may have no reader.
                log.exception("request to shard %d", self.part.shard)
            answer.set_exception(error)
        else:
            self.last_error = None
            answer.set_result(result)

    @property
    def _newest_here(self) -> tuple[int, int]:
        if self._fetched is not None:
            return self._fetched.version, self._fetched.token
        return self.version or NO_VERSION

    def _poll(self, newer: bool) -> UpdateStatus:
        self.asked_at = time.monotonic()
        known = self._newest_here if newer else None
        pushed = self.updates.pushed()
        while True:
            status = self._sender.status(_asked(pushed), known, self._chunk if newer else "")
            self._on_status(pushed, status)
            asked, pushed = set(pushed), self.updates.pushed()
            # The version may contain an update that was pushed after the question.
            if asked.issuperset(pushed):
                return status

    def _on_status(self, pushed: list[QueuedUpdate], status: UpdateStatus) -> UpdateStatus:
        self.updates.on_status(pushed, status)
        known = zip(pushed, status.outcomes, strict=True)
        applied = [fate == "applied" for update, fate in known if update.own and ":" not in fate]
        if applied != sorted(applied, reverse=True):
            self.overtaken = True
        elif self.updates.settled == self.updates.added:
            self.overtaken = False
        self._newer = status if status.meta is not None else None
        return status

    def _await_room(self) -> UpdateStatus:
        if not self.updates.full:
            return self._poll(newer=False)
        status = self._poll_after_commit()
        self.has_waited = not self.updates.full
        return status

    def _watch_and_fetch(self, out: Floats, base: Floats, *, adopts: bool) -> None:
        self._watch()
        if not (adopts and self._own_newer()):
            self._fetch(out, base)

    def _watch(self) -> UpdateStatus:
        # Asks afterwards: an update can be pushed meanwhile.
        self._seen = self._sender.wait_for_commit(COMMIT_WAIT_SECONDS, self._seen)
        return self._poll(newer=True)

    def _poll_after_commit(self) -> UpdateStatus:
        updates = self.updates
        if updates.max_unapplied > 1:
            # Waits for any of them; the last one may not be in the stream yet.
            return self._watch()
        if not updates.await_accepted(COMMIT_WAIT_SECONDS):
            return self._poll(newer=True)
        pushed = updates.pushed()
        self._seen, status = self._sender.status_after_commit(
            COMMIT_WAIT_SECONDS, self._seen, _asked(pushed), self._newest_here, self._chunk
        )
        return self._on_status(pushed, status)

    def _fetch_in_time(self, out: Floats, base: Floats, needed_at: float) -> None:
        wait = needed_at - FETCH_MARGIN * self._fetch_seconds - time.monotonic()
        if wait > 0:
            self._hurry.wait(wait)
        self._poll(newer=True)
        # If the interval's own update will make the queue full, the caller waits for a commit, and
        # a snapshot from before that wait is too old.
        if self.updates.unapplied + 1 < self.updates.max_unapplied:
            self._fetch(out, base)

    def _fetch(self, out: Floats, base: Floats) -> None:
        while self._newer is not None and not self.with_vector_slot(
            lambda: self._fetch_newer(out[:], base)
        ):
            self._poll(newer=True)

    def _fetch_newer(self, out: Tensor, base: Floats) -> bool:
        """Return False if it is unknown which of this worker's updates are in what was fetched."""
        newer, here = self._newer, self._newest_here
        assert newer is not None
        if self.steps is not None and self._fetched is None and self.version is not None:
            copy_floats(base, out)
        # Nothing can be taken while the vector is overwritten.
        self._fetched = self._newer = None
        settled = self.updates.settled
        started = time.monotonic()
        if self.steps is None:
            fetched = self._snapshots.fetch_rounded(out, newer.meta, newer.content)
        else:
            fetched = self._snapshots.follow(out, here, self.steps, newer.meta)
        self._fetch_seconds = time.monotonic() - started
        read, asked = (fetched.version, fetched.token), newer.meta
        if asked is None or read != (asked.version, asked.token):
            # What was read instead may contain more of this worker's updates.
            before, version = settled, self._poll(newer=False).version
            settled = self.updates.settled
            if version != read and settled != before:
                return False
        self._fetched, self._fetched_settled = fetched, settled
        return True

    # -- push thread -------------------------------------------------------------------------------

    def _push_all(self) -> None:
        try:
            seen, held = NO_COMMIT, 0.0
            while (update := self.updates.take_unsent()) is not None:
                vectors = update.vectors
                try:
                    if not self.updates.encode(update):
                        continue
                    self._push(update, held)
                    self._failures, held = 0, 0.0
                except StoreFull:
                    # The next commit makes room.
                    self._failures = 0
                    began = time.monotonic()
                    seen = self._wait_for_commit(seen)
                    held += time.monotonic() - began
                except TRANSIENT as error:
                    log.debug("push of subtask %d: %s", update.subtask, error)
                    self._on_failure(error)
                finally:
                    for vector in vectors:
                        vector.release()
                    del update
        except Exception as error:
            log.exception("pushing")
            self.updates.close(error)

    def _push(self, update: QueuedUpdate, held: float) -> None:
        """Push once. Raises :data:`TRANSIENT` errors if it has to be tried again.

        ``held`` are the seconds for which the update waited for others to be processed.
        """
        assert update.header is not None
        assert update.payload is not None
        alone = len(update.payload) > PIPELINED_BYTES and not self._flushing
        after = self.updates.names_before(update) if alone else []
        try:
            sent = update.header, update.epoch, update.payload, after
            pushed = self.with_vector_slot(lambda: self._sender.push(*sent))
        except TRANSIENT:
            raise  # They are errors of the store, too.
        except Fenced as error:
            log.info("subtask %d: %s", update.subtask, error)
            self.updates.discard(update, rework=False)
        except StoreError:
            log.exception("subtask %d can't be pushed", update.subtask)
            self.updates.discard(update, rework=True)
        else:
            if pushed.accepted:
                self.last_push_seconds = seconds = time.monotonic() - update.submitted_at - held
                whole = FLOAT32_BYTES * self.part.floats / max(len(update.payload), 1)
                self.push_seconds = max(seconds * max(1.0, whole), PUSH_DECAY * self.push_seconds)
                self.updates.on_accepted(update)
            else:
                self.updates.on_refused(update, pushed.position)

    def _on_failure(self, error: Exception) -> None:
        """Record why a push failed, and pause."""
        self._failures += 1
        if isinstance(error, StoreDenied):
            self.denied += 1
            if self._failures == 1:
                log.warning("the store node refuses pushes, which are retried: %s", error)
        self.updates.pause(jittered(backoff(self._failures, RETRY_SECONDS, MAX_RETRY_SECONDS)))

    def _wait_for_commit(self, seen: bytes) -> bytes:
        try:
            return self._sender.wait_for_commit(COMMIT_WAIT_SECONDS, seen)
        except TRANSIENT:
            time.sleep(RETRY_SECONDS)
            return seen


def _asked(pushed: Sequence[QueuedUpdate]) -> list[Pushed]:
    return [(update.subtask, update.epoch, update.stop, update.name) for update in pushed]
