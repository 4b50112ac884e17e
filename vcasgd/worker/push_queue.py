"""Updates of one shard: submitted, pushed by a thread, and kept until they are applied."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from vcasgd.backoff import backoff, jittered
from vcasgd.errors import (
    Fenced,
    SnapshotMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.updates import NO_COMMIT, Payload, UpdateSender, UpdateStatus
from vcasgd.worker.pending_updates import PendingUpdate, PendingUpdates, Settled

log = logging.getLogger(__name__)

#: Errors that pass without this worker's help.
TRANSIENT = (StoreUnavailable, StoreDenied, StoreFull, SnapshotMissing)
#: Seconds before a failed push is tried again, and the most that doubling makes of them: a server
#: that is back is noticed within a second.
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 1.0
#: Seconds for which pushes can be refused before that is an error of this worker. A restarted
#: server gets its users back within moments.
DENIED_SECONDS = 3.0
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
#: Seconds that :meth:`PushQueue.close` waits for the push thread.
CLOSE_SECONDS = 5.0


class PushQueue:
    """Owned by a :class:`~vcasgd.worker.shard_client.ShardClient`, whose threads share it.

    Its own thread pushes the updates in the order of submission, until each is in the stream.
    """

    def __init__(
        self, sender: UpdateSender, *, shard: int, floats: int, max_unapplied: int
    ) -> None:
        """``floats``: numbers of the shard's part."""
        self._sender = sender
        self._floats = floats
        #: Unapplied updates that make the queue :attr:`full`.
        self.max_unapplied = max_unapplied
        #: Guards the pending updates, and is notified when they change.
        self._changed = threading.Condition()
        self._pending = PendingUpdates()
        self._closed = self._hurries = False
        #: Seconds from the submission of an update until the server had accepted it, for one in
        #: float32, as a worker's last update is. The longest of the last ones.
        self.push_seconds = 0.0
        #: What ended the thread; raised in the training thread.
        self._error: Exception | None = None
        #: Pushes in a row that failed, and all that the server refused.
        self._failures = self._denied = 0
        #: Since when the server refuses them, by :func:`time.monotonic`, and why.
        self._denial: tuple[float, StoreDenied] | None = None
        self._thread = threading.Thread(
            target=self._push_all, name=f"shard-{shard}-push", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread. Updates that aren't pushed yet are lost; see :meth:`flush`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=CLOSE_SECONDS)

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
            if self._error is not None:
                raise self._error
            return self._pending.take_settled()

    def check_access(self) -> None:
        """Raise :class:`StoreDenied` while the server refuses pushes for longer than a moment."""
        with self._changed:
            if self._denial and time.monotonic() - self._denial[0] > DENIED_SECONDS:
                raise self._denial[1]

    def take_delays(self) -> list[float]:
        """Return the delays of applied updates; see :meth:`PendingUpdates.take_delays`."""
        with self._changed:
            return self._pending.take_delays()

    def flush(self, seconds: float) -> bool:
        """Wait until all updates are in the stream; False if that takes longer than ``seconds``."""
        with self._changed:
            self._hurries = True
        return self.await_accepted(seconds)

    def await_accepted(self, seconds: float) -> bool:
        """Do what :meth:`flush` does, without a hurry."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._pending.next_unsent() is None or self._error is not None,
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
    def submitted(self) -> int:
        """Number of updates that were submitted."""
        with self._changed:
            return self._pending.added

    @property
    def settled(self) -> int:
        """Number of them that the present version contains, or will never contain."""
        with self._changed:
            return self._pending.settled

    @property
    def full(self) -> bool:
        """True if the queue takes no further update until one is applied."""
        return self.unapplied >= self.max_unapplied

    def counts(self) -> dict[str, int]:
        """Return the counters of the heartbeat."""
        with self._changed:
            pending = self._pending
            return {
                "pushes": pending.sent,
                "pushed_bytes": pending.sent_bytes,
                "pushed_again": pending.sent_again,
                "discarded": pending.discarded,
                "denied": self._denied,
                "unapplied": pending.unapplied,
            }

    @property
    def takes_one(self) -> bool:
        """True if one update makes the queue :attr:`full`."""
        return self.max_unapplied == 1

    @property
    def fills_up(self) -> bool:
        """True if the next update makes the queue :attr:`full`."""
        return self.unapplied + 1 >= self.max_unapplied

    # -- outcomes ----------------------------------------------------------------------------------

    def sent(self) -> list[PendingUpdate]:
        """Return the updates whose outcome can be asked for."""
        with self._changed:
            return self._pending.all_sent()

    def on_status(self, sent: list[PendingUpdate], status: UpdateStatus) -> None:
        """Record the outcomes of :meth:`sent` updates."""
        with self._changed:
            self._pending.on_status(sent, status)
            self._changed.notify_all()

    # -- push thread -------------------------------------------------------------------------------

    def _push_all(self) -> None:
        try:
            seen, held = NO_COMMIT, 0.0
            while (update := self._next_unsent()) is not None:
                try:
                    self._push(update, held)
                    held = 0.0
                    self._on_access()
                    del update  # It refers to a vector, which may be applied soon.
                except StoreFull:
                    # The next commit makes room.
                    self._on_access()
                    began = time.monotonic()
                    seen = self._wait_for_commit(seen)
                    held += time.monotonic() - began
                except TRANSIENT as error:
                    log.debug("push of subtask %d: %s", update.subtask, error)
                    self._on_failure(error)
        except Exception as error:
            log.exception("pushing")
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _on_access(self) -> None:
        with self._changed:
            self._failures, self._denial = 0, None

    def _on_failure(self, error: Exception) -> None:
        """Record why a push failed, and pause."""
        with self._changed:
            self._failures += 1
            if not isinstance(error, StoreDenied):
                self._denial = None
            else:
                self._denied += 1
                if self._denial is None:
                    log.warning("the store node refuses pushes, which are retried: %s", error)
                    self._denial = time.monotonic(), error
            pause = backoff(self._failures, RETRY_SECONDS, MAX_RETRY_SECONDS)
            self._changed.wait_for(lambda: self._closed, timeout=jittered(pause))

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
        whole = seconds * max(1.0, FLOAT32_BYTES * self._floats / max(size, 1))
        self.push_seconds = max(whole, PUSH_DECAY * self.push_seconds)

    def _record(self, change: Callable[[PendingUpdates], None]) -> None:
        with self._changed:
            change(self._pending)
            self._changed.notify_all()
