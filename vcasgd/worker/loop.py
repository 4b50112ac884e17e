"""The worker's main loop: lease a work item and do it, until it has to leave."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vcasgd.errors import (
    LoopEnded,
    SnapshotMissing,
    StoreDenied,
    StoreFull,
    StoreUnavailable,
    VcasgdError,
)
from vcasgd.settings import Settings
from vcasgd.steady_time import steady_time
from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.leases import Lease, Renewal, Wait, WorkKind
from vcasgd.store.ledger.untrusted import LEFT, Heartbeat
from vcasgd.worker import WorkerContext
from vcasgd.worker.departure import GONE, Departure, NoticeWatch
from vcasgd.worker.error_handler import ErrorHandler
from vcasgd.worker.evaluate import evaluate
from vcasgd.worker.exchange import Exchange
from vcasgd.worker.gpus import OwnGpu, Throughput
from vcasgd.worker.learner import Learner
from vcasgd.worker.leases import (
    HeartbeatSender,
    LeaseBook,
    LeaseState,
    WorkerStatus,
    WorkInterrupted,
    capacity,
)
from vcasgd.worker.log_capture import LineCapture
from vcasgd.worker.moments_exchange import MomentsExchange
from vcasgd.worker.setup import Setup
from vcasgd.worker.trainer import Trainer, TunedSettings
from vcasgd.worker.verification import verification_of

if TYPE_CHECKING:
    from vcasgd.fleet.notices import Notice, NoticeSource

log = logging.getLogger(__name__)

#: Most subtasks whose updates may be unapplied before the worker leases another one.
MAX_UNSETTLED_SUBTASKS = 4
#: Most seconds between two polls for a notice, each of which looks up a file.
NOTICE_SECONDS = 0.25


class Worker:
    """One learner that works for one job.

    The job's code runs in ``folder``. ``build`` replaces the learner of the job's own task, for
    measurements.
    """

    def __init__(
        self,
        settings: Settings,
        job: str,
        name: str,
        *,
        machine: str | None = None,
        notices: NoticeSource | None = None,
        gpu: OwnGpu | None = None,
        build: Callable[[JobRecord], Learner] | None = None,
        folder: Path | None = None,
    ) -> None:
        context = WorkerContext.connect(settings, job, name)
        self._context = context
        self._machine = machine
        self._gpu = gpu or OwnGpu()
        self._throughput = Throughput(self._gpu)
        self._status = WorkerStatus()
        self._book = LeaseBook()
        self._departure = Departure(settings.lease_seconds, self._push_seconds)
        self.exchange = Exchange(context.nodes, job, settings.patience_seconds, context.key)
        self._tuned = TunedSettings(context.ledger, job, name)
        self._setup = Setup(
            *(context, self.exchange, self._status, self._leaves, self._gpu),
            *(build, folder),
        )
        self._moments = MomentsExchange(context.nodes, job, name)
        verification = verification_of(context, self._leaves)
        self._trainer = Trainer(
            *(name, self.exchange, self._book, self._departure, self._status, self._tuned),
            *(self._moments, verification),
        )
        self._errors = ErrorHandler(
            context, self.exchange, self._book, self._departure, self._status
        )
        self._capture = LineCapture(context.jobs, job, name)
        self._heartbeat = HeartbeatSender(
            context.leases,
            self._book,
            period=settings.heartbeat,
            describe=self._describe,
            alive=lambda: self._status.makes_progress(settings.stall_seconds),
            on_renewal=self._on_renewal,
        )
        period = min(settings.heartbeat, NOTICE_SECONDS)
        self._watch = NoticeWatch(notices, period, self._on_notice) if notices else None

    # -- life --------------------------------------------------------------------------------------

    def run(self) -> str:
        """Work until the job has ended or the worker has to leave; return why it left."""
        with self._capture.installed():
            self._heartbeat.start()
            if self._watch:
                self._watch.start()
            try:
                while not self._departure.leave_if_due():
                    self._round()
            finally:
                self._end()
        log.info("%s leaves: %s", self._context.name, self._departure.reason)
        return self._departure.reason

    def leave(self, reason: str) -> None:
        """Make the worker push its updates, return its leases, and end."""
        self._departure.leave(reason)

    def _end(self) -> None:
        self._status.doing = "leaving"
        if self._watch:
            self._watch.stop()
        try:
            if not self._departure.job_over:
                self._hand_over()
        except (StoreUnavailable, StoreDenied, StoreFull):
            log.warning("could not return the leases; they will expire")
        self.exchange.close()
        self._setup.close()
        self._status.doing = f"{LEFT}{self._departure.reason}"
        self._heartbeat.stop()

    def _hand_over(self) -> None:
        """Push all updates, then return the leases of unfinished work.

        In this order, so that the next worker finds the pushed part.
        """
        self.exchange.flush(self._departure.seconds_left())
        for lease in self._book.held(LeaseState.WORKING, LeaseState.POSTPONED):
            self._context.leases.release(lease)
            self._book.drop(lease)

    # -- one work item after the other -------------------------------------------------------------

    def _round(self) -> None:
        try:
            self._work_once()
            self._errors.on_success()
        except WorkInterrupted:
            pass
        except VcasgdError as error:
            self._errors.on_error(error, self._heartbeat.last_answer)
        finally:
            self._status.unpushed_since = None

    def _work_once(self) -> None:
        if self._departure.finishing and not self._book.held(LeaseState.POSTPONED):
            self._departure.leave("drain")
            return
        # The job's state arrives with a heartbeat, after the ledger has checked that this machine
        # may see the job's data.
        ready = self._departure.job_started and not self._departure.leave_if_due()
        if ready and not self._setup.prepared:
            self._learner()
        lease = self._next_lease()
        if lease is None:
            return
        match lease.kind:
            case WorkKind.INITIALISE:
                self._setup.initialise(lease)
                self._book.drop(lease)
            case WorkKind.EVALUATE:
                why = evaluate(
                    *(self._context, self._status, lease, self._learner()),
                    lambda: self._trainer.may_continue(lease),
                )
                self._book.drop(lease)
                if why is not None:
                    raise LoopEnded(why)
            case WorkKind.TRAIN:
                self._trainer.train(lease, self._learner())
                self._book.finish(lease)

    def _learner(self) -> Learner:
        learner = self._setup.learner()
        self._tuned.follow(learner.spec.tuning)
        return learner

    def _next_lease(self) -> Lease | None:
        """Return the lease to work on; None if there is nothing to do at the moment."""
        try:
            if self._setup.prepared:
                self._trainer.settle()
        except SnapshotMissing:
            # Usually the parameter server publishes the model again. If the model is lost for
            # good, a worker has to make the first snapshot again before any other work.
            only = WorkKind.INITIALISE
            return self._book.resume(only) or self._acquire_or_idle(only)
        if self.exchange.missing:
            # A shard has lost its model. The others can go on unless all wait for this one.
            only = WorkKind.INITIALISE
            first = self._book.resume(only) or self._acquire(only)
            if isinstance(first, Lease):
                return first
        if lease := self._book.resume():
            return lease
        if len(self.exchange.subtasks()) >= MAX_UNSETTLED_SUBTASKS:
            self._idle("waiting for the parameter server")
            return None
        return self._acquire_or_idle()

    def _acquire(self, only: WorkKind | None = None) -> Lease | Wait:
        answer = self._context.leases.acquire(only, idle=not self.exchange.subtasks())
        if isinstance(answer, Lease):
            self._book.start(answer)
        return answer

    def _acquire_or_idle(self, only: WorkKind | None = None) -> Lease | None:
        answer = self._acquire(only)
        if isinstance(answer, Lease):
            return answer
        if answer.reason == GONE or answer.quarantined or answer.uncleared:
            self._departure.leave(answer.reason)
        self._idle(answer.reason)
        return None

    def _idle(self, reason: str) -> None:
        self._status.doing = f"idle: {reason}"
        self._status.note_progress()
        self._departure.wait()

    def _leaves(self) -> bool:
        """Record that a long step goes on; return True if the worker has to leave."""
        self._status.note_progress()
        return self._departure.leave_if_due()

    # -- called by other threads -------------------------------------------------------------------

    def _push_seconds(self) -> float:
        """Return the seconds until a last update would be pushed: after the local step in progress,
        and one more for what encodings have kept back."""
        return 2 * (self._status.step_seconds or 0.0) + self.exchange.push_seconds

    def _on_renewal(self, renewal: Renewal) -> None:
        self._departure.on_renewal(renewal)
        self._tuned.refresh()
        self._capture.flush()

    def _on_notice(self, notice: Notice) -> None:
        self._departure.on_notice(notice)
        # The controller counts no crash of a worker whose heartbeat has told of the notice.
        self._heartbeat.send_now()

    def _describe(self) -> Heartbeat:
        status, departure = self._status, self._departure
        return Heartbeat(
            at=steady_time(),
            machine=self._machine,
            host=socket.gethostname(),
            pid=os.getpid(),
            **vars(status),
            **self.exchange.counts(),
            push_seconds=self.exchange.last_push_seconds or None,
            **capacity(),
            **self._throughput.fields(status.samples, status.flops_per_sample),
            device=self._gpu.device,
            gpus=self._gpu.count,
            reading=self._setup.reading() or None,
            notice=departure.notice.kind if departure.notice else None,
            notice_at=departure.notice.at if departure.notice else None,
            leaving=departure.reason or None,
        )
