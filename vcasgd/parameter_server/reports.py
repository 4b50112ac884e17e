"""What a parameter server tells the ledger: progress, history, metrics, and whom not to trust."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.tuning import implicit_momentum
from vcasgd.parameter_server.model_state import ModelState
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.costs import Costs
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Accounts
from vcasgd.store.tensors.snapshot import Totals
from vcasgd.store.tensors.updates import UNSIGNED, Header

log = logging.getLogger(__name__)

#: rejected updates in a row after which a worker is not asked again
REJECTIONS_BEFORE_QUARANTINE = 5
#: seconds between two points of the metrics
METRICS_SECONDS = 1.0
#: events kept while the ledger is away
EVENTS_KEPT = 1000
#: subtasks applied in part that the ledger is told of: as many as workers, usually
MOST_PARTLY = 1000
#: rejections that say nothing bad of a worker: another one was faster, an earlier update of the
#: same subtask was lost, or the server that held the payload
INNOCENT = frozenset({"duplicate", "out-of-place", "missing"})


class Reports:
    """Everything is kept until the ledger has heard it, and may be told twice.

    Methods that talk to the ledger raise :class:`~vcasgd.errors.StoreUnavailable`, and
    :class:`~vcasgd.errors.Fenced` once a newer parameter server has spoken.
    """

    def __init__(
        self,
        ledger: RedisClient,
        job: str,
        token: int,
        clock: Callable[[], float],
        *,
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        self._jobs = Jobs(ledger)
        self._costs = Costs(ledger)
        self._accounts = Accounts(ledger, job, shard, shards)
        self._shard = shard
        self._where = {"shard": shard} if shards > 1 else {}
        self._job = job
        self._token = token
        self._clock = clock
        self._unsaid: deque[tuple[str, str, dict[str, Any]]] = deque(maxlen=EVENTS_KEPT)
        self._unaccounted: list[int] = []
        self._behind = False
        #: names of rejected updates since the last good one, by worker
        self._rejections: defaultdict[str, set[str]] = defaultdict(set)
        self._unattributed = 0
        self._reported: tuple[float, Totals] = (clock(), Totals())

    def say(self, kind: str, text: str, **details: Any) -> None:
        """An event for the job's history."""
        prefix = f"shard {self._shard}: " if self._where else ""
        self._unsaid.append((kind, f"{prefix}{text}", {**details, **self._where}))

    # -- workers -------------------------------------------------------------------------------

    def applied(self, worker: str) -> None:
        self._rejections.pop(worker, None)

    def rejected(self, header: Header | None, error: InvalidUpdate) -> None:
        """Says so, and after too many in a row the worker gets no more work."""
        if error.reason in INNOCENT:
            return
        if header is None or error.reason == UNSIGNED:
            self._say_unattributed(error)
            return
        worker, names = header.worker, self._rejections[header.worker]
        log.warning("%s: update of %s rejected: %s", self._job, worker, error)
        # one that is put into the stream again, by whomever, is no second fault of the worker's
        if header.update not in names and len(names) < REJECTIONS_BEFORE_QUARANTINE:
            names.add(header.update)
            text = f"an update of {worker} was rejected: {error.message}"
            self.say("update-rejected", text, worker=worker, reason=error.reason)
        if len(names) == REJECTIONS_BEFORE_QUARANTINE:
            why = f"{len(names)} updates in a row were rejected, last: {error.reason}"
            if self._jobs.quarantine(self._job, worker, why):
                self.say("worker-quarantined", f"{worker}: {why}", worker=worker)

    def _say_unattributed(self, error: InvalidUpdate) -> None:
        """Nobody knows who sent it. A flood of such must not wash the history away."""
        self._unattributed += 1
        if self._unattributed.bit_count() == 1:  # 1, 2, 4, 8, …
            log.warning("%s: %d updates of nobody: %s", self._job, self._unattributed, error)
            text = f"{self._unattributed} updates without a known author so far: {error.message}"
            self.say("update-rejected", text, worker="unknown", reason=error.reason)

    # -- progress ------------------------------------------------------------------------------

    def begin(self, model: ModelState) -> None:
        """Progress counts from here."""
        self._reported = (self._clock(), model.meta.totals)

    def reconcile(self, model: ModelState) -> None:
        """The whole applied record, after a parameter server took over."""
        reopened = self._accounts.reconcile(
            self._token,
            model.meta.version,
            model.record.finished_epochs,
            _totals(model),
            model.record.done_subtasks(),
        )
        log.info("%s: version %d, %d subtasks open again", self._job, model.meta.version, reopened)

    def fenced_by(self) -> int | None:
        """The token of a newer parameter server that the ledger knows of."""
        newest = self._accounts.newest_token()
        return newest if newest > self._token else None

    def ask_for_initial(self) -> None:
        """There is no model any more; a worker has to make the first one again."""
        self._accounts.reconcile(self._token, 0, 0, "{}", [], initialise=True)
        self.say("restarted", "the model was lost before its first checkpoint; it starts anew")
        self._say_all()

    def published(self, done: list[int]) -> None:
        """There is progress to tell; ``done`` are subtasks that it completed."""
        self._unaccounted += done
        self._behind = True

    def tell(self, model: ModelState) -> None:
        self._say_all()
        if self._behind:
            self._accounts.account(
                self._token,
                model.meta.version,
                model.record.finished_epochs,
                _totals(model),
                self._unaccounted,
            )
            self._unaccounted, self._behind = [], False

    def _say_all(self) -> None:
        while self._unsaid:
            kind, text, details = self._unsaid[0]
            self._jobs.event(self._job, kind, text, **details)
            self._unsaid.popleft()

    def add_metrics(self, model: ModelState, waiting: Callable[[], int]) -> None:
        """A point of the series, if the last one is old enough and something happened.

        The first shard speaks for all: each update has a part in every one.
        """
        if self._shard:
            return
        now, totals = self._clock(), model.meta.totals
        since, before = self._reported
        updates, samples = totals.updates - before.updates, totals.samples - before.samples
        if now - since < METRICS_SECONDS or not updates:
            return
        staleness = (totals.staleness_sum - before.staleness_sum) / updates
        point = {
            "at": now,
            "version": model.meta.version,
            "updates": totals.updates,
            "samples": totals.samples,
            "finished_epochs": model.record.finished_epochs,
            "updates_per_second": updates / (now - since),
            "samples_per_second": samples / (now - since),
            "loss": (totals.loss_sum - before.loss_sum) / samples,
            "staleness_mean": staleness,
            "staleness_max": totals.staleness_max,
            "implicit_momentum": implicit_momentum(staleness),
            "mixing_factor": model.factor,
            "rejected": sum(totals.rejected.values()),
            "waiting": waiting(),
            "workers": self._jobs.worker_count(self._job),
            "spent_usd": self._costs.spent(self._job),
        }
        self._jobs.add_metrics(self._job, point)
        self._reported = (now, totals)


def _totals(model: ModelState) -> str:
    """Two counts that must agree: samples of all updates, and what the applied record says."""
    recorded = model.record.samples_applied
    counted = model.meta.totals.samples
    partly = sorted(model.partly)[:MOST_PARTLY]
    return model.meta.totals.to_json(applied=recorded, repeated=counted - recorded, partly=partly)
