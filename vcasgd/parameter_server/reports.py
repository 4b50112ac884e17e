"""Reports of a parameter server to the ledger: progress, events, metrics, and quarantines."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from heapq import nsmallest
from typing import Any

from vcasgd.errors import Fenced, InvalidUpdate, StoreUnavailable
from vcasgd.learning.tuning import implicit_momentum
from vcasgd.parameter_server.blend import ModelState
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.costs import Costs
from vcasgd.store.ledger.job import Failure
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.placement import Owners, Suspect
from vcasgd.store.ledger.servers import Accounts
from vcasgd.store.ledger.tuning import Tuned, Tunings
from vcasgd.store.tensors.header import UNSIGNED, Header
from vcasgd.store.tensors.snapshot import UpdateTotals
from vcasgd.threads import Background

log = logging.getLogger(__name__)

#: Rejected updates in a row after which a worker gets no more work.
REJECTIONS_BEFORE_QUARANTINE = 5
#: Seconds between two reports to the ledger while no subtask is completed, and between two reads of
#: what the controller has tuned.
REPORT_SECONDS, TUNED_SECONDS = 0.2, 0.5
#: Seconds between two points of the metrics, at least this part of the job's age. So their number
#: grows with its logarithm, and recent ones are closest to each other.
METRICS_SECONDS, METRICS_AGE_SHARE = 1.0, 1 / 2000
#: Events kept while the ledger is unavailable.
EVENTS_KEPT = 1000
#: Events that concern all shards of a store node alike, so that only its first one adds them.
OF_NODE = frozenset(
    {"restored", "restarted", "republished", "rounded", "unreplicated", "replicated"}
)
#: Partly applied subtasks in a report; usually there is one per worker.
MAX_PARTLY = 1000
#: Reasons that do not count against a worker: another worker was faster, an earlier update of the
#: same subtask was lost, a server lost the payload, the model went back to an earlier one, or its
#: owner is excluded already.
INNOCENT = frozenset({"duplicate", "out-of-place", "missing", "rolled-back", "suspect"})


class Reports:
    """Reports of one shard, which are kept until the ledger has them, and may be sent twice.

    ``prompt`` connects to the ledger for calls that can't wait long. ``executor`` sends reports;
    without one, :meth:`exchange` does. ``created_at``: Unix time of the job's submission.
    ``is_first``: no earlier shard is on the same store node. ``period``: seconds between two
    reports that aren't urgent.

    Methods that access the ledger raise :class:`~vcasgd.errors.StoreUnavailable`, and
    :class:`~vcasgd.errors.Fenced` after a newer parameter server has reported.
    """

    def __init__(
        self,
        ledger: RedisClient,
        job: str,
        token: int,
        clock: Callable[[], float],
        *,
        created_at: float,
        prompt: RedisClient | None = None,
        shard: int = 0,
        shards: int = 1,
        is_first: bool = True,
        period: float = REPORT_SECONDS,
        executor: Executor | None = None,
    ) -> None:
        self._jobs, self._prompt_jobs = Jobs(ledger), Jobs(prompt or ledger)
        self._tunings = Tunings(ledger, job)
        self._background = Background[Tuned | None](executor)
        self._reported_at = self._tuned_at = float("-inf")
        self._costs = Costs(ledger)
        self._owners = Owners(ledger)
        self._accounts = Accounts(ledger, job, shard, shards)
        self._prompt_accounts = Accounts(prompt or ledger, job, shard, shards)
        self._shard = shard
        self._is_first = is_first
        self._shard_details = {"shard": shard} if shards > 1 else {}
        self._job = job
        self._token = token
        #: Seconds between two reports while none is urgent.
        self._period = period
        self._clock = clock
        self._created_at = created_at
        self._events: deque[tuple[str, str, dict[str, Any]]] = deque(maxlen=EVENTS_KEPT)
        #: Workers that get no more work, each with why.
        self._quarantines: deque[tuple[str, str]] = deque(maxlen=EVENTS_KEPT)
        #: Failures that count against the job.
        self._failures: deque[Failure] = deque(maxlen=EVENTS_KEPT)
        #: Owners whose work is wrong.
        self._suspects: deque[tuple[str, Suspect]] = deque(maxlen=EVENTS_KEPT)
        self._unaccounted: list[int] = []
        self._behind = False
        #: True if the next report must not wait.
        self.urgent = False
        #: True until the ledger has the whole applied record, and True if the last report has it.
        self._whole = self._sending_whole = False
        #: Newest evaluation point that is worth an evaluation.
        self._point = 0
        #: Subtasks in the last report, until it has succeeded.
        self._sending: list[int] = []
        #: Names of rejected updates since the last valid one, by worker.
        self._rejections: defaultdict[str, set[str]] = defaultdict(set)
        self._unattributed = 0
        #: Time and totals of the last point of the metrics, and of the previous one.
        self._measured = self._measured_before = (clock(), UpdateTotals())

    def add_event(self, kind: str, text: str, **details: Any) -> None:
        """Add an event to the job's history."""
        if kind in OF_NODE and not self._is_first:
            return
        self.urgent = True
        prefix = f"shard {self._shard}: " if self._shard_details else ""
        self._events.append((kind, f"{prefix}{text}", {**details, **self._shard_details}))

    # -- workers -------------------------------------------------------------------------------

    def applied(self, worker: str) -> None:
        """Record a valid update of a worker."""
        self._rejections.pop(worker, None)

    def rejected(self, header: Header | None, error: InvalidUpdate) -> None:
        """Report a rejected update, and quarantine its worker after too many in a row."""
        if error.reason in INNOCENT:
            return
        if header is None or error.reason == UNSIGNED:
            self._report_unattributed(error)
            return
        worker, names = header.worker, self._rejections[header.worker]
        log.warning("%s: update of %s rejected: %s", self._job, worker, error)
        # The same update counts once: another worker may have put it into the stream again.
        if header.update not in names and len(names) < REJECTIONS_BEFORE_QUARANTINE:
            names.add(header.update)
            text = f"an update of {worker} was rejected: {error.message}"
            self.add_event("update-rejected", text, worker=worker, reason=error.reason)
        if len(names) == REJECTIONS_BEFORE_QUARANTINE:
            why = f"{len(names)} updates in a row were rejected, last: {error.reason}"
            self._quarantines.append((worker, why))
            self.urgent = True

    def failed(self, failure: Failure) -> None:
        """Report a failure of work on the job, as workers do."""
        self._failures.append(failure)
        self.urgent = True

    def accuse(self, owner: str, suspect: Suspect) -> None:
        """Give the workers of an owner no more work."""
        log.warning("%s: owner %s: %s", self._job, owner, suspect.why)
        self._suspects.append((owner, suspect))
        self.urgent = True

    def _report_unattributed(self, error: InvalidUpdate) -> None:
        """Report an update of an unknown sender, rarely enough not to flood the history."""
        self._unattributed += 1
        if self._unattributed.bit_count() == 1:  # 1, 2, 4, 8, …
            log.warning(
                "%s: %d updates of unknown senders: %s", self._job, self._unattributed, error
            )
            text = f"{self._unattributed} updates of unknown senders so far: {error.message}"
            self.add_event("update-rejected", text, worker="unknown", reason=error.reason)

    # -- progress ------------------------------------------------------------------------------

    def begin(self, model: ModelState) -> None:
        """Start the metrics at the model's present progress."""
        self._measured = (self._clock(), model.meta.totals)

    def reconcile(self, model: ModelState) -> None:
        """Report the whole applied record after a takeover, with the next report."""
        self._whole, self._point, self.urgent = True, model.point, True

    def check_newest(self) -> None:
        """Raise :class:`Fenced` for a newer parameter server, if the tensors server may have lost
        its fence."""
        if (newest := self._prompt_accounts.newest_token()) > self._token:
            raise Fenced(f"a parameter server with token {newest} has taken over")

    def reported_version(self) -> int:
        """Return the version that the shard's parameter servers have reported last."""
        return self._prompt_accounts.reported_version()

    def job_is_over(self) -> bool:
        try:
            return self._prompt_jobs.is_over(self._job)
        except StoreUnavailable:
            return False

    def request_initial_model(self) -> None:
        """Request a new initial model from a worker, because the model is lost."""
        self._prompt_accounts.reconcile(self._token, 0, 0, "{}", {}, initialise=True)
        self.add_event(
            "restarted", "the model was lost before its first checkpoint; the job restarts"
        )
        self._send_events()

    def published(self, done: list[int], point: int | None = None) -> None:
        """Record a publication for the next report.

        ``done`` are the subtasks that it completed, and ``point`` is the evaluation point that it
        reached.
        """
        self._unaccounted += done
        if point is not None:
            self._point = point
        self.urgent = self.urgent or bool(done) or point is not None
        self._behind = True

    def exchange(
        self, model: ModelState, waiting: Callable[[], int], *, at_once: bool
    ) -> Tuned | None:
        """Take the result of the last report, and start the next one if it is time.

        ``waiting`` returns the number of updates in the stream. Returns what the controller has
        tuned, if it was read again. Raises the error of a report, whose content is kept.
        """
        tuned = self._take()
        now = time.monotonic()
        due = at_once or self.urgent or now - self._reported_at >= self._period
        if due and not self._background.busy:
            self._reported_at = now
            self._background.start(self._report(model, waiting))
            tuned = self._take() or tuned
        return tuned

    def _take(self) -> Tuned | None:
        try:
            return self._background.take()
        except Exception:
            self._keep()
            raise

    def _report(self, model: ModelState, waiting: Callable[[], int]) -> Callable[[], Tuned | None]:
        """Return a call that sends what is pending now, in any thread."""
        account = self._account(model) if self._whole or self._behind else None
        self._sending, self._unaccounted, self._behind = self._unaccounted, [], False
        self.urgent = False
        self._sending_whole, self._whole = self._whole, False
        self._measured_before = self._measured
        point = self._metrics(model, waiting)

        def send() -> Tuned | None:
            self._send_quarantines()
            self._send_events()
            if account is not None:
                account()
            if point is not None:
                workers, spent = self._jobs.workers.count(self._job), self._costs.spent(self._job)
                now = {**point, "workers": workers, "spent_usd": spent}
                self._jobs.add_metrics(self._job, now)
            if time.monotonic() - self._tuned_at < TUNED_SECONDS:
                return None
            tuned = self._tunings.read()
            self._tuned_at = time.monotonic()
            return tuned

        return send

    def _account(self, model: ModelState) -> Callable[[], object]:
        """Return a call that reports what was applied: after a takeover all of it, else the new."""
        call: Callable[..., object] = self._accounts.account
        done: object = self._unaccounted
        if self._whole:
            call, done = self._accounts.reconcile, model.record.done.blocks
        return partial(
            call,
            self._token,
            model.meta.version,
            model.record.finished_epochs,
            _totals(model),
            done,
            samples=model.record.samples_applied,
            point=self._point,
        )

    def _keep(self) -> None:
        """Report again what the last report didn't send."""
        self._whole = self._whole or self._sending_whole
        self._unaccounted, self._behind = [*self._sending, *self._unaccounted], True
        self.urgent = True
        self._measured = self._measured_before

    def _send_quarantines(self) -> None:
        while self._quarantines:
            worker, why = self._quarantines[0]
            if self._jobs.workers.quarantine(self._job, worker, why):
                self.add_event("worker-quarantined", f"{worker}: {why}", worker=worker)
            self._quarantines.popleft()
        while self._failures:
            self._jobs.report_failure(self._job, self._failures[0])
            self._failures.popleft()
        while self._suspects:
            owner, suspect = self._suspects[0]
            if self._owners.accuse(self._job, owner, suspect):
                text = f"owner {owner} gets no more work: {suspect.why}"
                self.add_event("owner-quarantined", text, owner=owner, why=suspect.why)
            self._suspects.popleft()

    def _send_events(self) -> None:
        while self._events:
            kind, text, details = self._events[0]
            self._jobs.event(self._job, kind, text, **details)
            self._events.popleft()

    def _metrics(self, model: ModelState, waiting: Callable[[], int]) -> dict[str, Any] | None:
        """Return a point of the metrics if the last one is old enough and updates were applied.

        Only the first shard does this, because each update has a part in every shard.
        """
        if self._shard:
            return None
        now, totals = self._clock(), model.meta.totals
        since, before = self._measured
        updates, samples = totals.updates - before.updates, totals.samples - before.samples
        trained = samples - (totals.skipped - before.skipped)
        pause = max(METRICS_SECONDS, (now - self._created_at) * METRICS_AGE_SHARE)
        if now - since < pause or not updates:
            return None
        self._measured = (now, totals)
        staleness = (totals.staleness_sum - before.staleness_sum) / updates
        return {
            "at": now,
            "version": model.meta.version,
            "updates": totals.updates,
            "samples": totals.samples,
            "finished_epochs": model.record.finished_epochs,
            "updates_per_second": updates / (now - since),
            "samples_per_second": samples / (now - since),
            "loss": (totals.loss_sum - before.loss_sum) / max(trained, 1),
            "logged": totals.logged_since(before) or None,
            "staleness_mean": staleness,
            "staleness_max": totals.staleness_max,
            "implicit_momentum": implicit_momentum(staleness),
            "mixing_factor": model.factor,
            "rejected": sum(totals.rejected.values()),
            "waiting": waiting(),
        }


def _totals(model: ModelState) -> str:
    """Return the totals as JSON, with the samples that the record counts, their difference, and how
    often wrong work was undone."""
    recorded = model.record.samples_applied
    counted = model.meta.totals.samples
    partly = nsmallest(MAX_PARTLY, model.record.positions)
    return model.meta.totals.to_json(
        applied=recorded,
        repeated=counted - recorded,
        partly=partly,
        restorations=model.meta.restorations,
    )
