"""Decides when a worker leaves, and why, and watches for notices of eviction."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from vcasgd.steady_time import steady_time
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.leases import Renewal

if TYPE_CHECKING:
    from vcasgd.fleet.notices import Notice, NoticeSource

log = logging.getLogger(__name__)

#: Seconds to pause while there is nothing to do, or something isn't ready yet.
IDLE_SECONDS = 0.2
#: Fraction of the time until an eviction that pushing may take; the rest is for the last heartbeat.
FLUSH_SHARE = 0.8
#: Part of a notice that a worker keeps in reserve beyond the time of its last push, in seconds and
#: as a share of the notice; the larger one counts.
MARGIN_SECONDS, MARGIN_SHARE = 1.0, 0.03
#: State of a job that is no longer in the ledger.
GONE = "gone"


class Departure:
    """Collects the reasons to leave: the job's state, a notice of eviction, a signal, an error.

    Called by all threads of a worker. ``lease_seconds`` bounds the time for a last subtask, and
    ``push_seconds()`` is the time from now until a last update would be pushed.
    """

    def __init__(
        self, lease_seconds: float, push_seconds: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._lease_seconds = lease_seconds
        self._push_seconds = push_seconds
        self._event = threading.Event()
        self._job_state = JobState.STARTING.value
        #: Deadline for finishing the current subtask, which is the last one; None if it isn't.
        self._finish_by: float | None = None
        #: Why the worker leaves; empty while it stays.
        self.reason = ""
        #: The last notice of eviction, and when it arrived.
        self.notice: Notice | None = None
        self._noticed_at = 0.0

    def leave_if_due(self) -> bool:
        """Leave if the last moment after a notice has come; return True once the worker leaves."""
        notice = self.notice
        if notice is not None and notice.kind == "terminate" and not self._event.is_set():
            leave_at = last_moment(self._noticed_at, notice.at, self._push_seconds())
            if steady_time() >= leave_at:
                self.leave("notice of eviction")
        return self._event.is_set()

    @property
    def finishing(self) -> bool:
        """True if the worker leaves after its current subtask."""
        return self._finish_by is not None

    @property
    def job_started(self) -> bool:
        """True once the job has its first snapshot."""
        return self._job_state != JobState.STARTING

    @property
    def job_over(self) -> bool:
        """True if the job has ended, so it needs no more updates."""
        return _is_over(self._job_state)

    def leave(self, reason: str) -> None:
        """Make the worker push its updates, return its leases, and end. The first reason counts."""
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def wait(self, seconds: float = IDLE_SECONDS) -> None:
        """Pause, at most until the worker has to leave."""
        self._event.wait(seconds)

    def seconds_left(self) -> float:
        """Return how many seconds pushing the last updates may take."""
        if self.notice and self.notice.at:
            return max(0.5, (self.notice.at - steady_time()) * FLUSH_SHARE)
        return self._lease_seconds

    def on_renewal(self, renewal: Renewal) -> None:
        """React to the answer to a heartbeat."""
        if renewal.uncleared:
            self.leave(renewal.leave)
        self._job_state = renewal.state
        if _is_over(renewal.state):
            self.leave("the job has ended")
        elif renewal.state == JobState.PAUSED:
            self.leave("the job is paused")
        elif renewal.leave == "drain" and self.notice and self.notice.kind == "rebalance":
            self._finish_and_leave()
        elif renewal.leave:
            self.leave(renewal.leave)

    def on_notice(self, notice: Notice) -> None:
        """React to a notice of eviction: train on until :func:`last_moment`."""
        log.info("notice: %s at %s", notice.kind, notice.at)
        self._noticed_at = steady_time()
        self.notice = notice

    def _finish_and_leave(self) -> None:
        """Leave after the current subtask.

        The replacement is training already and the machine stays for a while, so there is time to
        finish; but the controller kills a worker that takes too long.
        """
        if self._finish_by is None:
            self._finish_by = steady_time() + self._lease_seconds
        elif steady_time() >= self._finish_by:
            self.leave("drain")


class NoticeWatch(threading.Thread):
    """Thread that polls a source every ``period`` seconds until the first notice to terminate.

    ``on_notice`` is called once for each new kind of notice.
    """

    def __init__(
        self, source: NoticeSource, period: float, on_notice: Callable[[Notice], None]
    ) -> None:
        super().__init__(name="notices", daemon=True)
        self._source = source
        self._period = period
        self._on_notice = on_notice
        self._stopped = threading.Event()
        self._last_kind: str | None = None

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                if self._poll_once():
                    return
            except Exception:
                # A notice is only a hint; without one, leases cover the loss of the machine.
                log.exception("poll for a notice of eviction")
            self._stopped.wait(self._period)

    def stop(self) -> None:
        self._stopped.set()

    def _poll_once(self) -> bool:
        """Return True after a notice to terminate; no other follows it."""
        notice = self._source.poll()
        if notice is None or notice.kind == self._last_kind:
            return False
        self._last_kind = notice.kind
        self._on_notice(notice)
        return notice.kind == "terminate"


def last_moment(noticed_at: float, gone_at: float | None, push_seconds: float) -> float:
    """Return when a worker has to stop training after a notice, in Unix seconds.

    The machine goes at ``gone_at``; if that is unknown, at any moment.
    """
    if gone_at is None:
        return noticed_at
    margin = max(MARGIN_SECONDS, MARGIN_SHARE * (gone_at - noticed_at))
    return gone_at - margin - push_seconds


def _is_over(state: str) -> bool:
    return state == GONE or any(state == known and known.over for known in JobState)
