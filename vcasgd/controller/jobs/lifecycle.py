"""What the controller does for one job: it starts, is checkpointed, and comes to an end.

Each step looks at the ledger and the tensors server and does the next thing; nothing is
remembered that the next controller would need.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from vcasgd.backoff import backoff
from vcasgd.errors import NotFound, SnapshotMissing, StorageUnavailable, StoreUnavailable
from vcasgd.learning.shards import Cut
from vcasgd.learning.vector import Layout
from vcasgd.storage.checkpoints import Checkpoints, StoredCheckpoint
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.job import Evaluation, Failure, JobRecord, JobState
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.tensors.sharded import Kept, ShardedSnapshots, Whole, forget, versions_of
from vcasgd.store.tensors.snapshot import epoch_pin

log = logging.getLogger(__name__)

#: a piece of work that fails so often, on as many machines if there are so many, is hopeless
ATTEMPTS = 3
#: between two checkpoints at the ends of epochs that are shorter than that
LEAST_SECONDS_BETWEEN_CHECKPOINTS = 2.0
#: pause after a failed write; doubles up to the second number
RETRY_SECONDS = (1.0, 30.0)
#: the name of the pin for checkpoints between the ends of epochs
PERIODIC = "periodic"


class JobLifecycle:
    """Brings one job from its submission to its end, one :meth:`step` at a time.

    Steps raise :class:`StoreUnavailable` while a server is away and may be repeated.
    """

    def __init__(
        self,
        job: str,
        *,
        ledger: RedisClient,
        nodes: Sequence[RedisClient],
        storage: Storage,
        writer: ThreadPoolExecutor,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._job = job
        self._jobs = Jobs(ledger)
        self._nodes = nodes
        self._model: ShardedSnapshots | None = None
        self._stranded = False
        self._checkpoints = Checkpoints(storage, job)
        self._writer = writer
        self._clock = clock
        self._writing: tuple[str, Future[StoredCheckpoint]] | None = None
        self._written_at = clock()
        self._retry_at = 0.0
        self._failed_writes = 0
        #: that submitted the job; known from the first step on
        self.request: str | None = None

    def step(self) -> None:
        job = self._jobs.get(self._job)
        self.request = job.request
        self._collect_write()
        match job.state:
            case JobState.STARTING:
                self._start(job)
            case JobState.RUNNING:
                self._run(job)
            case JobState.FINISHING:
                self._finish(job)
            case JobState.PAUSED | JobState.SUCCEEDED | JobState.FAILED | JobState.CANCELLED:
                pass

    def clean_up(self) -> bool:
        """Removes what a job that is over has in the tensors server. True when it is done."""
        if self._writing is not None:
            self._collect_write()
            return False
        forget(self._nodes, self._job)
        return True

    def _snapshots(self, job: JobRecord) -> ShardedSnapshots:
        """Raises :class:`StoreUnavailable` where not all of the job's store nodes are known."""
        if self._model is None:
            assert job.facts is not None
            layout = Layout.from_json(job.facts.layout)
            cut = Cut(layout.floats, layout.parameters, job.facts.shards, layout.sent)
            try:
                self._model = ShardedSnapshots(self._nodes, job.id, cut)
            except StoreUnavailable as error:
                self._say_stranded(error)
                raise
        return self._model

    def _say_stranded(self, error: StoreUnavailable) -> None:
        if not self._stranded:
            self._jobs.event(self._job, "store-nodes-missing", f"{error.message}; {error.remedy}")
            self._stranded = True

    # -- states -------------------------------------------------------------------------------

    def _start(self, job: JobRecord) -> None:
        if job.facts is not None:
            self._jobs.transition(
                job.id,
                JobState.RUNNING,
                [JobState.STARTING],
                why="the first snapshot is there; training starts",
                started_at=self._clock(),
            )
        else:
            self._fail_if_hopeless(job)

    def _run(self, job: JobRecord) -> None:
        if self._fail_if_hopeless(job):
            return
        for evaluation, why in self._endings(job):
            if self._has_model(job, evaluation):
                self._jobs.transition(
                    job.id,
                    JobState.FINISHING,
                    [JobState.RUNNING],
                    why=why,
                    final_epoch=evaluation.epoch,
                )
                return
        self._keep_checkpoints(job)

    def _endings(self, job: JobRecord) -> Iterator[tuple[Evaluation, str]]:
        """Evaluations of models with which the job may end now, and why."""
        if not job.evaluations:
            return
        newest, metric = job.evaluations[-1], job.spec.stop.chosen_metric
        for each in reversed(job.evaluations):
            if metric is not None and metric.reached_by(each.metrics):
                value = f"{metric.name} {each.metrics[metric.name]:.4f}"
                yield each, f"{value} reached {metric.target:g} in epoch {each.epoch}"
        if job.finished_epochs >= job.spec.epochs and newest.epoch == job.spec.epochs:
            yield newest, f"all {job.spec.epochs} epochs are done"
        limit = job.spec.stop.max_duration
        if limit and job.started_at and self._clock() - job.started_at > limit.total_seconds():
            yield newest, f"max_duration is over; the last evaluated epoch is {newest.epoch}"

    def _has_model(self, job: JobRecord, evaluation: Evaluation) -> bool:
        """Whether the evaluated model was not lost in the meantime."""
        if self._still_there(job, evaluation):
            return True
        return self._checkpoints.find(evaluation.versions) is not None

    def _finish(self, job: JobRecord) -> None:
        """The job ends when the model that was evaluated last is safely in the storage."""
        evaluation = next((each for each in job.evaluations if each.epoch == job.final_epoch), None)
        if evaluation is None:
            self._go_back(job)
            return
        if not self._may_write():
            return
        stored = self._checkpoints.find(evaluation.versions)
        if stored is not None:
            self._jobs.transition(
                job.id,
                JobState.SUCCEEDED,
                [JobState.FINISHING],
                why=job.reason or "done",
                model=stored.name,
            )
            return
        last, best = epoch_pin(evaluation.epoch), _best_of(job, self._snapshots(job).pins())
        pinned = self._snapshots(job).pinned(last)
        if best is not None and best != last:
            self._write(job, best)
        elif pinned is not None and versions_of(pinned) == evaluation.versions:
            self._write(job, last)
        elif not self._still_there(job, evaluation):
            self._go_back(job)

    def _go_back(self, job: JobRecord) -> None:
        self._jobs.transition(
            job.id,
            JobState.RUNNING,
            [JobState.FINISHING],
            why=f"the model of epoch {job.final_epoch} was lost before it was stored",
        )

    def _still_there(self, job: JobRecord, evaluation: Evaluation) -> bool:
        """Whether the evaluated snapshots are kept, or present; those get their pin back."""
        pin = epoch_pin(evaluation.epoch)
        return self._snapshots(job).still_there(pin, evaluation.versions)

    def _fail_if_hopeless(self, job: JobRecord) -> bool:
        failures = self._jobs.failures(job.id)
        hopeless = next((each for each in failures if each.fatal), None)
        hopeless = hopeless or _repeated(failures, len(self._jobs.workers(job.id)))
        if hopeless is None:
            return False
        self._jobs.transition(
            job.id,
            JobState.FAILED,
            [JobState.STARTING, JobState.RUNNING],
            why=hopeless.message,
            traceback=hopeless.traceback,
        )
        return True

    # -- checkpoints ----------------------------------------------------------------------------

    def checkpoint_now(self, seconds: float) -> None:
        """Writes the present snapshot, within ``seconds``: before everything is stopped."""
        job = self._jobs.get(self._job)
        if job.facts is None or job.state not in (
            JobState.RUNNING,
            JobState.PAUSED,
            JobState.FINISHING,
        ):
            return
        deadline = time.monotonic() + seconds
        snapshots = self._snapshots(job)
        snapshots.unpin(PERIODIC)
        snapshots.want_pin(PERIODIC)
        while snapshots.pinned(PERIODIC) is None or self._writing is not None:
            if time.monotonic() > deadline:
                raise StoreUnavailable("the parameter server did not keep a snapshot in time")
            self._collect_write()
            time.sleep(0.02)
        self._write_pinned(job, PERIODIC)
        snapshots.unpin(PERIODIC)

    def _keep_checkpoints(self, job: JobRecord) -> None:
        if self._writing is not None:
            return
        kept = self._snapshots(job).pins()
        name = self._due(job, kept)
        self._drop_spare_pins(job, kept, keep=name)
        if name is not None and self._may_write():
            self._write(job, name)
        elif PERIODIC not in kept.whole and self._periodic_is_due(job):
            # a shard whose tensors server came back empty has forgotten that it was asked
            self._snapshots(job).want_pin(PERIODIC)

    def _periodic_is_due(self, job: JobRecord) -> bool:
        return self._clock() - self._written_at > job.spec.checkpoint.every.total_seconds()

    def _due(self, job: JobRecord, kept: Kept) -> str | None:
        """The pin that is to be written next."""
        best = _best_of(job, kept)
        if best is not None:
            return best
        evaluated = [each for each in job.evaluations if epoch_pin(each.epoch) in kept.whole]
        if evaluated and self._worth_it(job, evaluated[-1]):
            return epoch_pin(evaluated[-1].epoch)
        return PERIODIC if PERIODIC in kept.whole else None

    def _worth_it(self, job: JobRecord, evaluation: Evaluation) -> bool:
        rested = self._clock() - self._written_at >= LEAST_SECONDS_BETWEEN_CHECKPOINTS
        return rested or evaluation.epoch == job.spec.epochs

    def _drop_spare_pins(self, job: JobRecord, kept: Kept, keep: str | None) -> None:
        """Pins of evaluated epochs cost the memory of a model each."""
        for evaluation in job.evaluations[:-1]:
            name = epoch_pin(evaluation.epoch)
            # until it is written, the pin is the only copy of the best model
            if name in kept.names and name != keep and evaluation != job.best:
                self._snapshots(job).unpin(name)

    def _may_write(self) -> bool:
        return self._writing is None and self._clock() >= self._retry_at

    def _write(self, job: JobRecord, pin: str) -> None:
        self._writing = (pin, self._writer.submit(copy_context().run, self._write_pinned, job, pin))

    def _write_pinned(self, job: JobRecord, pin: str) -> StoredCheckpoint:
        assert job.facts is not None
        whole, floats = self._snapshots(job).fetch_pinned(pin)
        present = self._checkpoints.find(versions_of(whole))
        if present is not None:
            return present
        state = self._snapshots(job).fetch_states(whole)
        stored = self._checkpoints.write(whole, Layout.from_json(job.facts.layout), floats, state)
        self._list(job, stored, pin, whole)
        return stored

    def _list(self, job: JobRecord, stored: StoredCheckpoint, pin: str, whole: Whole) -> None:
        """Prunes old checkpoints and tells the ledger which there are."""
        known = self._jobs.checkpoints(job.id)
        known[stored.name] = {
            "version": stored.version,
            "versions": versions_of(whole),
            "digest": stored.digest,
            "size": stored.size,
            "at": self._clock(),
            "of": pin,
            "finished_epochs": min(each.record.finished for each in whole),
            "samples": min(each.meta.totals.samples for each in whole),
        }
        kept = self._worth_keeping(job, known) | {stored.name}
        self._checkpoints.prune(job.spec.checkpoint.keep, kept)
        left = {each.name for each in self._checkpoints.all()}
        self._jobs.set_checkpoints(
            job.id, {name: each for name, each in known.items() if name in left}
        )

    def _worth_keeping(self, job: JobRecord, known: dict[str, dict[str, Any]]) -> frozenset[str]:
        """The best model, and the one with which the job ends, however old they are."""
        present = self._jobs.get(job.id)
        versions = {
            each.versions
            for each in present.evaluations
            if each == present.best or each.epoch == present.final_epoch
        }
        return frozenset(
            name for name, each in known.items() if tuple(each["versions"]) in versions
        )

    def _collect_write(self) -> None:
        if self._writing is None or not self._writing[1].done():
            return
        assert self._model is not None
        pin, future = self._writing
        self._writing = None
        try:
            stored = future.result()
        except SnapshotMissing:
            return  # the pin vanished with the tensors server
        except (StorageUnavailable, StoreUnavailable, NotFound) as error:
            self._say_failed(str(error))
            return
        self._say_written(stored)
        self._model.unpin(pin)

    def _say_failed(self, why: str) -> None:
        if not self._failed_writes:
            self._jobs.event(
                self._job,
                "checkpoint-failed",
                f"a checkpoint can't be written: {why}; training goes on, and it is tried again",
            )
        self._failed_writes += 1
        self._retry_at = self._clock() + backoff(self._failed_writes, *RETRY_SECONDS)
        log.warning("%s: checkpoint: %s", self._job, why)

    def _say_written(self, stored: StoredCheckpoint) -> None:
        self._failed_writes, self._retry_at, self._written_at = 0, 0.0, self._clock()
        self._jobs.event(
            self._job,
            "checkpoint",
            f"version {stored.version} is stored ({stored.size / 1e6:.1f} MB)",
            name=stored.name,
            version=stored.version,
        )


def _best_of(job: JobRecord, kept: Kept) -> str | None:
    """The pin of the best model. It is dropped when the model is stored, so it is not yet."""
    # without a metric, the best epoch is the newest one, which has its own rule
    pin = epoch_pin(job.best.epoch) if job.metric is not None and job.best is not None else None
    return pin if pin in kept.whole else None


def _repeated(failures: list[Failure], workers: int) -> Failure | None:
    """The last failure of a piece of work that failed often enough, on enough machines."""
    by_piece: dict[str, list[Failure]] = defaultdict(list)
    for failure in failures:
        by_piece[failure.piece].append(failure)
    for same in by_piece.values():
        machines = {failure.worker for failure in same}
        if len(same) >= ATTEMPTS and len(machines) >= min(ATTEMPTS, max(1, workers)):
            return same[-1]
    return None
