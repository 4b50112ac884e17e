"""Reactions of a worker to errors that end its current work."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from vcasgd.errors import (
    Cause,
    LoopEnded,
    NonFiniteLoss,
    StoreDenied,
    StoreFull,
    StoreUnavailable,
    UserCodeError,
    VcasgdError,
    fault_of,
)
from vcasgd.printable import masked
from vcasgd.store.connection import patiently
from vcasgd.store.ledger.job import PREPARE, Failure
from vcasgd.store.ledger.leases import WorkKind
from vcasgd.worker import WorkerContext
from vcasgd.worker.departure import Departure
from vcasgd.worker.exchange import Exchange
from vcasgd.worker.leases import LeaseBook, WorkerStatus

log = logging.getLogger(__name__)

#: Seconds to pause after an error of the user's code, and the most that doubling makes of them.
FAILURE_SECONDS = (0.5, 30.0)


@dataclass
class ErrorHandler:
    """Keeps, returns or drops the current lease after an error, and gives up after too many."""

    context: WorkerContext
    exchange: Exchange
    book: LeaseBook
    departure: Departure
    status: WorkerStatus
    #: Start of the time in which a server refused this worker and nothing else went wrong.
    _denied_at: float | None = field(default=None, init=False)
    #: Failures of the user's code in a row.
    _failures: int = field(default=0, init=False)
    _samples_at_failure: int = field(default=0, init=False)

    def on_success(self) -> None:
        """Record that no server refuses this worker."""
        self._denied_at = None

    def on_error(self, error: VcasgdError, last_answer: float) -> None:
        """React to an error by whose fault it is (:mod:`vcasgd.errors`).

        ``last_answer`` is the time of the ledger's last answer, by :func:`time.monotonic`.
        """
        match fault_of(error):
            case Cause.SUPERSEDED:
                log.info("%s", error)
                self._drop_current()
            case Cause.STORE:
                self._on_outage(error, last_answer)
            case _:
                self._on_failure(error)

    # -- a server is unavailable -------------------------------------------------------------------

    def _on_outage(self, error: VcasgdError, last_answer: float) -> None:
        """Resume the current work later; leave if the ledger is unavailable for too long."""
        log.debug("%s", error)
        patience = self.context.settings.patience_seconds
        silent = time.monotonic() - last_answer
        if silent > patience:
            self.departure.leave(f"the ledger did not answer for {silent:.0f} s: {error}")
        self._check_denial(error, patience)
        if (lease := self.book.working) is not None:
            self.book.postpone(lease)
        self.status.note_progress()
        self.departure.wait()

    def _check_denial(self, error: VcasgdError, patience: float) -> None:
        """Leave if the servers refuse this worker for too long.

        A restarted server gets its users back within moments, so a longer refusal is permanent.
        """
        if not isinstance(error, StoreDenied):
            self._denied_at = None
        elif self._denied_at is None:
            log.info("%s; the work is postponed", error)
            self._denied_at = time.monotonic()
        elif time.monotonic() - self._denied_at > patience:
            log.error("%s", error)
            self.departure.leave(str(error))

    # -- the job or this machine fails -------------------------------------------------------------

    def _on_failure(self, error: VcasgdError) -> None:
        """Report the failure, return the lease, and pause so that other workers try first."""
        traceback = error.traceback if isinstance(error, UserCodeError) else ""
        if isinstance(error, LoopEnded):
            log.info("%s", error)
        else:
            log.error("%s\n%s", error, traceback)
        self._report(error, traceback)
        self._drop_current()
        if self.status.samples > self._samples_at_failure:
            self._failures = 0
        first, most = FAILURE_SECONDS
        self.status.note_progress()
        self.departure.wait(min(first * 2**self._failures, most))
        self._failures += 1
        self._samples_at_failure = self.status.samples

    def _report(self, error: VcasgdError, traceback: str) -> None:
        """Report the failure to the controller, which decides whether the job fails."""
        context, lease = self.context, self.book.working
        failure = Failure(
            worker=context.name,
            piece=lease.piece if lease else PREPARE,
            message=masked(str(error)),
            traceback=masked(traceback),
            fault=fault_of(error),
            diverged=isinstance(error, NonFiniteLoss),
            ended=isinstance(error, LoopEnded),
            rollbacks=self.exchange.rollbacks,
        )
        try:
            patiently(
                lambda: context.jobs.report_failure(context.job, failure),
                context.settings.patience_seconds,
                give_up=self.departure.leave_if_due,
            )
            if lease is not None:
                context.leases.release(lease)
        except (StoreUnavailable, StoreDenied, StoreFull) as outage:
            log.warning("could not report a failure: %s", outage)

    def _drop_current(self) -> None:
        lease = self.book.working
        if lease is None:
            return
        self.book.drop(lease)
        if lease.kind is WorkKind.TRAIN:
            self.exchange.forget(lease.number)
