"""The worker: lease → fetch → train → push, until there is nothing left or it has to go.

A worker keeps nothing that can't be lost. It runs inside a Ray actor, or as a process of its
own with ``python -m vcasgd.worker.loop --job JOB --worker NAME``.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from typing import Any

from vcasgd.backoff import backoff
from vcasgd.errors import (
    Fenced,
    PackageError,
    SnapshotMissing,
    SpecError,
    StorageUnavailable,
    StoreDenied,
    StoreUnavailable,
    UserCodeError,
    VcasgdError,
)
from vcasgd.logging import configure_logging, exit_status, identify
from vcasgd.settings import Settings, load_settings
from vcasgd.store.connection import patiently
from vcasgd.store.ledger.job import Failure, JobState
from vcasgd.store.ledger.leases import Lease, Renewal, Wait, WorkKind
from vcasgd.worker.capacity import capacity
from vcasgd.worker.context import WorkerContext, WorkInterrupted
from vcasgd.worker.heartbeat import (
    HeartbeatSender,
    LineCapture,
    NoticeLike,
    NoticePoll,
    NoticeWatch,
)
from vcasgd.worker.setup import Chores
from vcasgd.worker.trainer import Trainer

log = logging.getLogger(__name__)

#: pause after an error of the user's code; doubles up to the second number
FAILURE_SECONDS = (0.5, 30.0)
#: subtasks that may wait to be applied before no more work is leased
MOST_AWAITED = 4
#: part of the time to an eviction that the flush may take; the rest is for the last words
FLUSH_SHARE = 0.8
#: between two looks for a notice, at most
NOTICE_SECONDS = 1.0

#: mallopt parameters of <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class Worker:
    """One learner at work for one job."""

    def __init__(
        self,
        settings: Settings,
        job: str,
        name: str,
        *,
        instance: str | None = None,
        notices: NoticePoll | None = None,
    ) -> None:
        self._settings = settings
        self._instance = instance
        self._desk = WorkerContext(settings, job, name)
        self._trainer = Trainer(self._desk)
        self._chores = Chores(self._desk)
        self._why = ""
        self._state = JobState.STARTING.value
        self._notice: NoticeLike | None = None
        #: until when the present subtask may be finished; ``None``: nobody wants it to be the last
        self._last_until: float | None = None
        #: since when a server refuses this worker, and nothing else
        self._denied_at: float | None = None
        self._capture = LineCapture(self._desk.jobs, job, name)
        self._heart = HeartbeatSender(
            self._desk.leases,
            self._desk.held,
            period=settings.heartbeat,
            describe=self._describe,
            alive=self._desk.makes_progress,
            heard=self._heard,
            flush_logs=self._capture.flush,
        )
        period = min(settings.heartbeat, NOTICE_SECONDS)
        self._watch = NoticeWatch(notices, period, self._noticed) if notices else None

    # -- life ----------------------------------------------------------------------------------

    def run(self) -> str:
        """Until the job is over or the worker has to go; returns why it went."""
        keep_freed_memory()
        with self._capture.installed():
            self._heart.start()
            if self._watch:
                self._watch.start()
            try:
                while not self._desk.leaving.is_set():
                    self._round()
            finally:
                self._go()
        log.info("%s leaves: %s", self._desk.name, self._why)
        return self._why

    def leave(self, why: str) -> None:
        """Asks the worker to push what it has, give back the rest, and end."""
        if not self._desk.leaving.is_set():
            self._why = why
            self._desk.leaving.set()

    def _go(self) -> None:
        self._desk.doing = "leaving"
        if self._watch:
            self._watch.stop()
        try:
            if not JobState(self._state).over and self._state != "gone":
                self._hand_over()
        except (StoreUnavailable, StoreDenied, ValueError):
            log.warning("could not hand over; the leases will expire")
        self._desk.links.close()
        self._chores.close()
        self._desk.doing = f"left: {self._why}"
        self._heart.stop()

    def _hand_over(self) -> None:
        """Pushes what is trained, then gives back what is not; in this order, so that whoever
        goes on finds the pushed part already there."""
        self._desk.links.flush(self._seconds_left())
        self._desk.release_unfinished()

    def _seconds_left(self) -> float:
        if self._notice and self._notice.at:
            return max(0.5, (self._notice.at - time.time()) * FLUSH_SHARE)
        return self._settings.lease_seconds

    # -- one piece of work after the other -----------------------------------------------------

    def _round(self) -> None:
        try:
            self._work_once()
            self._denied_at = None
        except WorkInterrupted:
            pass
        except (UserCodeError, SpecError, PackageError) as error:
            self._report_failure(error)
        except (StoreUnavailable, StoreDenied, SnapshotMissing, StorageUnavailable) as error:
            self._bear(error)
        except Fenced as error:
            log.info("%s", error)
            self._desk.drop_current()
        finally:
            self._desk.unpushed_since = None

    def _work_once(self) -> None:
        # the state comes with a heartbeat, after a word that the machine may not see the job
        if self._last_until is not None and not self._desk.again:
            self.leave("drain")
            return
        began = self._state != JobState.STARTING
        if began and not self._chores.prepared and not self._desk.leaving.is_set():
            self._chores.learner()
        lease = self._next_piece()
        if lease is None:
            return
        self._desk.current = lease
        match lease.kind:
            case WorkKind.INITIALISE:
                self._chores.initialise(lease)
            case WorkKind.EVALUATE:
                self._chores.evaluate(lease)
            case WorkKind.TRAIN:
                self._trainer.train(lease, self._chores.learner())
        self._desk.current = None

    def _next_piece(self) -> Lease | None:
        try:
            if self._chores.prepared:
                self._trainer.settle()
        except SnapshotMissing:
            # the parameter server brings it back, unless it was lost for good: then somebody
            # has to make the first one again, before any other work can go on
            return self._take_up_again(WorkKind.INITIALISE) or self._acquire(WorkKind.INITIALISE)
        if self._desk.links.missing and (lease := self._initialisation()):
            return lease
        if lease := self._take_up_again():
            return lease
        if len(self._desk.links.subtasks()) >= MOST_AWAITED:
            return self._idle("waiting for the parameter server")
        return self._acquire()

    def _take_up_again(self, only: WorkKind | None = None) -> Lease | None:
        again = self._desk.again
        for piece, lease in list(again.items()):
            if not self._desk.held.has(lease):
                del again[piece]
            elif only in (None, lease.kind):
                return again.pop(piece)
        return None

    def _acquire(self, only: WorkKind | None = None) -> Lease | None:
        answer = self._desk.leases.acquire(only)
        if isinstance(answer, Wait):
            if answer.reason == "gone" or answer.quarantined or answer.uncleared:
                self.leave(answer.reason)
            return self._idle(answer.reason)
        self._desk.held.add(answer)
        return answer

    def _initialisation(self) -> Lease | None:
        """Some shard has no model; the others go on, unless this is what is waited for."""
        answer = self._desk.leases.acquire(WorkKind.INITIALISE)
        if isinstance(answer, Wait):
            return None
        self._desk.held.add(answer)
        return answer

    def _idle(self, reason: str) -> Lease | None:
        self._desk.doing = f"idle: {reason}"
        self._desk.pause()
        return None

    # -- when something goes wrong -------------------------------------------------------------

    def _bear(self, error: VcasgdError) -> None:
        """A server is away. Everything is kept; after too long a time the worker gives up."""
        log.debug("%s", error)
        silent = time.monotonic() - self._heart.last_answer
        if silent > self._settings.patience_seconds:
            self.leave(f"the ledger did not answer for {silent:.0f} s: {error}")
        self._bear_denial(error)
        self._desk.postpone_current()
        self._desk.pause()

    def _bear_denial(self, error: VcasgdError) -> None:
        """A server that was restarted knows this worker again within moments, or something is
        wrong for good."""
        if not isinstance(error, StoreDenied):
            self._denied_at = None
        elif self._denied_at is None:
            self._denied_at = time.monotonic()
        elif time.monotonic() - self._denied_at > self._settings.patience_seconds:
            log.error("%s", error)
            self.leave(str(error))

    def _report_failure(self, error: VcasgdError) -> None:
        """Tells the controller, which decides what an error of the user's code means."""
        desk = self._desk
        failure = Failure(
            worker=desk.name,
            piece=desk.current.piece if desk.current else "prepare",
            message=str(error),
            traceback=error.traceback if isinstance(error, UserCodeError) else "",
            # what the data set or the model is does not change from one attempt to the next
            fatal=isinstance(error, SpecError),
        )
        log.error("%s\n%s", error, failure.traceback)
        try:
            patiently(
                lambda: desk.jobs.report_failure(desk.job, failure),
                self._settings.patience_seconds,
                give_up=desk.leaving.is_set,
            )
            if desk.current is not None:
                desk.leases.release(desk.current)
        except (StoreUnavailable, StoreDenied) as unheard:
            log.warning("the ledger did not hear of it: %s", unheard)
        desk.drop_current()
        desk.failures += 1
        # others get the first chance to do better with the same piece
        desk.pause(backoff(desk.failures, *FAILURE_SECONDS))

    # -- what the other threads say and ask ----------------------------------------------------

    def _heard(self, renewal: Renewal) -> None:
        if renewal.uncleared:
            self.leave(renewal.leave)
        self._state = renewal.state
        if renewal.state == "gone" or JobState(renewal.state).over:
            self.leave(f"the job is {renewal.state}")
        elif renewal.state == JobState.PAUSED:
            self.leave("the job is paused")
        elif renewal.leave == "drain" and self._notice and self._notice.kind == "rebalance":
            self._finish_and_leave()
        elif renewal.leave:
            self.leave(renewal.leave)
        self._desk.hear_tuning()

    def _finish_and_leave(self) -> None:
        """Others are at work already, and the machine stays: there is time to finish the subtask,
        though not for ever, because who does not leave in time is killed."""
        if self._last_until is None:
            self._last_until = time.monotonic() + self._settings.lease_seconds
        elif time.monotonic() >= self._last_until:
            self.leave("drain")

    def _noticed(self, notice: NoticeLike) -> None:
        log.info("notice: %s at %s", notice.kind, notice.at)
        self._notice = notice
        if notice.kind == "terminate":
            self.leave("notice of eviction")
        # the controller orders a replacement as soon as it hears of it
        self._heart.hurry()

    def _describe(self) -> dict[str, Any]:
        desk, notice = self._desk, self._notice
        return {
            "at": time.time(),
            "instance": self._instance,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "doing": desk.doing,
            "steps": desk.steps,
            "samples": desk.samples,
            "step_seconds": desk.step_seconds,
            "local_steps": desk.local_steps,
            "momentum": desk.momentum,
            "unpushed_since": desk.unpushed_since,
            **desk.links.counts(),
            **capacity(),
            "reading": self._chores.reading() or None,
            "notice": notice.kind if notice else None,
            "notice_at": notice.at if notice else None,
            "leaving": self._why or None,
        }


def main() -> int:
    """The process. Exit status 0 when it left in good order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", required=True)
    parser.add_argument("--worker", required=True)
    options = parser.parse_args()
    configure_logging("worker")
    identify(job=options.job, worker=options.worker)
    try:
        worker = Worker(load_settings(), options.job, options.worker)
        signal.signal(signal.SIGTERM, lambda _number, _frame: worker.leave("SIGTERM"))
        worker.run()
    except VcasgdError as error:
        return exit_status(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())


def keep_freed_memory() -> None:
    """Large blocks that are freed stay with the process, where its C library is glibc.

    By default each tensor of more than 32 MiB is given back to the system when it is freed, and
    the next one has to be zeroed and mapped page by page again. A worker frees and needs the
    same sizes all the time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
