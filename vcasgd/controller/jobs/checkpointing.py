"""Checkpoints of one job: when to write which snapshot, and which files to keep."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

from vcasgd.backoff import backoff
from vcasgd.errors import NotFound, SnapshotMissing, StorageUnavailable, StoreUnavailable
from vcasgd.storage.checkpoints import Checkpoints, StoredCheckpoint
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.job import Evaluation, JobRecord
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Evaluations
from vcasgd.store.tensors.snapshot_index import (
    ModelPins,
    ModelSnapshot,
    PinnedSnapshots,
    nodes_of,
    versions_of,
)

log = logging.getLogger(__name__)

#: Seconds between two checkpoints of evaluated models; skips some of more frequent ones.
MIN_SECONDS_BETWEEN_CHECKPOINTS = 2.0
#: Seconds to wait after the first failed write, and at most after later ones.
RETRY_SECONDS = (1.0, 30.0)
#: Seconds between two polls of a pin that was requested.
POLL_SECONDS = 0.02
#: Characters of an unexpected error in an event.
MAX_REASON_LENGTH = 300
#: Name of the pin for checkpoints between evaluations.
PERIODIC = "periodic"


class CheckpointWriter:
    """Writes and prunes the checkpoints of one job, one write at a time in a background thread.

    Methods raise :class:`StoreUnavailable` while a server is unavailable and can be repeated.
    """

    def __init__(
        self,
        job: str,
        *,
        jobs: Jobs,
        evaluations: Evaluations,
        nodes: Sequence[RedisClient],
        storage: Storage,
        executor: ThreadPoolExecutor,
        clock: Callable[[], float],
    ) -> None:
        self._job = job
        self._jobs = jobs
        self._nodes = nodes
        self._checkpoints = Checkpoints(storage, job)
        self._storage = storage
        self._evaluations = evaluations
        self._executor = executor
        self._clock = clock
        self._model: ModelPins | None = None
        self._reported_missing_nodes = False
        self._writing: tuple[str, Future[StoredCheckpoint]] | None = None
        #: The checkpoint that was just found or written.
        self._stored: StoredCheckpoint | None = None
        self._written_at = clock()
        self._retry_at = 0.0
        self._failed_writes = 0

    def collect(self) -> None:
        """Take the result of a write that has ended, and report it as an event."""
        if self._writing is None or not self._writing[1].done():
            return
        assert self._model is not None
        pin, future = self._writing
        self._writing = None
        try:
            stored = future.result()
        except SnapshotMissing:
            return  # The pin was lost with the tensors server.
        except (StorageUnavailable, StoreUnavailable, NotFound) as error:
            self._report_failed(str(error))
            return
        except Exception as error:
            log.exception("%s: checkpoint", self._job)
            self._report_failed(f"{type(error).__name__}: {error}"[:MAX_REASON_LENGTH])
            return
        self._failed_writes, self._retry_at, self._written_at = 0, 0.0, self._clock()
        self._stored = stored
        self._model.unpin(pin)

    @property
    def idle(self) -> bool:
        """True if no write is in progress."""
        return self._writing is None

    def has_model(self, job: JobRecord, evaluation: Evaluation) -> bool:
        """Return True if the evaluated model is still in the tensors servers or in the storage."""
        versions = evaluation.versions
        return self._in_memory(job, evaluation) or self._checkpoints.find(versions) is not None

    def write_due(self, job: JobRecord) -> None:
        """Start to write the checkpoint that is due, if any, and unpin models that are not."""
        if self._writing is not None:
            return
        self._stored = None  # It can be lost while training goes on.
        pins = self._snapshots(job).pins()
        name = self._due_pin(job, pins)
        self._drop_spare_pins(job, pins, keep=name)
        if name is not None and self._may_write():
            self._start_write(job, name)
        elif PERIODIC not in pins.whole and self._periodic_is_due(job):
            # Repeated, because a shard loses the request when its tensors server restarts empty.
            self._snapshots(job).request_pin(PERIODIC)

    def store(self, job: JobRecord, evaluation: Evaluation) -> StoredCheckpoint | None:
        """Return the checkpoint of an evaluated model, or start to write it and return None.

        The best model is written first if it is not stored yet. The storage, which may be slow to
        answer, is only asked if the model isn't pinned. Raises
        :class:`~vcasgd.errors.SnapshotMissing` if the evaluated model is lost.
        """
        if not self._may_write():
            return None
        if self._stored is not None and self._stored.has(evaluation.versions):
            return self._stored
        if self._start_store(job, evaluation):
            return None
        if stored := self._checkpoints.find(evaluation.versions):
            return stored
        if self._in_memory(job, evaluation):
            return None
        raise SnapshotMissing(f"the model of {evaluation.place} is lost")

    def _start_store(self, job: JobRecord, evaluation: Evaluation) -> bool:
        """Start to write the best or the evaluated model; return False if neither is pinned."""
        snapshots = self._snapshots(job)
        last, best = _pin(job, evaluation), _best_pin(job, snapshots.pins())
        pinned = snapshots.pinned(last)
        if best is not None and best != last:
            self._start_write(job, best)
        elif pinned is not None and versions_of(pinned) == evaluation.versions:
            self._start_write(job, last)
        else:
            return False
        return True

    def write_now(self, job: JobRecord, seconds: float) -> None:
        """Write the present snapshot before everything is stopped.

        Raises :class:`StoreUnavailable` if the parameter server pins none within ``seconds``.
        """
        deadline = time.monotonic() + seconds
        snapshots = self._snapshots(job)
        snapshots.unpin(PERIODIC)
        snapshots.request_pin(PERIODIC)
        while snapshots.pinned(PERIODIC) is None or self._writing is not None:
            if time.monotonic() > deadline:
                raise StoreUnavailable("the parameter server did not pin a snapshot in time")
            self.collect()
            time.sleep(POLL_SECONDS)
        self._write_pinned(job, PERIODIC)
        snapshots.unpin(PERIODIC)

    # -- models -------------------------------------------------------------------------------

    def _nodes_of(self, job: JobRecord) -> Sequence[RedisClient]:
        """Return the store node of each shard. Raises :class:`StoreUnavailable`."""
        assert job.facts is not None
        return nodes_of(self._nodes, job.facts.store_nodes, job.facts.shards, job.id)

    def _snapshots(self, job: JobRecord) -> ModelPins:
        """Return the job's snapshots.

        Raises :class:`StoreUnavailable` if not all of its store nodes are configured.
        """
        if self._model is None:
            assert job.facts is not None
            try:
                self._model = ModelPins(self._nodes_of(job), job.id, job.facts.shards)
            except StoreUnavailable as error:
                if not self._reported_missing_nodes:
                    text = f"{error.message}; {error.remedy}"
                    self._jobs.event(job.id, "store-nodes-missing", text)
                    self._reported_missing_nodes = True
                raise
        return self._model

    def _in_memory(self, job: JobRecord, evaluation: Evaluation) -> bool:
        """Return True if the evaluated snapshots are pinned or current; pin them again if so."""
        pin = _pin(job, evaluation)
        return self._snapshots(job).still_there(pin, evaluation.versions)

    def _due_pin(self, job: JobRecord, pins: PinnedSnapshots) -> str | None:
        """Return the pin to write next: the best model, the newest one, or the periodic one."""
        best = _best_pin(job, pins)
        if best is not None:
            return best
        evaluated = [each for each in job.evaluations if _pin(job, each) in pins.whole]
        if evaluated and self._evaluated_is_due(job, evaluated[-1]):
            return _pin(job, evaluated[-1])
        return PERIODIC if PERIODIC in pins.whole else None

    def _evaluated_is_due(self, job: JobRecord, evaluation: Evaluation) -> bool:
        rested = self._clock() - self._written_at >= MIN_SECONDS_BETWEEN_CHECKPOINTS
        return rested or (job.points is not None and evaluation.number == job.points.last)

    def _periodic_is_due(self, job: JobRecord) -> bool:
        return self._clock() - self._written_at > job.spec.checkpoint.every.total_seconds()

    def _drop_spare_pins(self, job: JobRecord, pins: PinnedSnapshots, keep: str | None) -> None:
        """Unpin models that no evaluation needs, each of which occupies the memory of one model.

        They are evaluated, or were left out because a newer one is evaluated.
        """
        if job.best is None or job.points is None:
            return
        newest, best = job.evaluations[-1].number, job.best.number
        numbers = {name: job.points.number_of(name) for name in pins.names - {keep}}
        # Until it is written, the pin is the only copy of the best model.
        older = {n: name for name, n in numbers.items() if n is not None and best != n < newest}
        if not older.keys() <= {each.number for each in job.evaluations}:
            pending, done = self._evaluations.read()
            # A result that is newer than the job's record may be the best one.
            known = pending | done - {each.number for each in job.evaluations}
            older = {n: name for n, name in older.items() if n not in known}
        for name in older.values():
            self._snapshots(job).unpin(name)

    # -- writing ------------------------------------------------------------------------------

    def _may_write(self) -> bool:
        return self._writing is None and self._clock() >= self._retry_at

    def _start_write(self, job: JobRecord, pin: str) -> None:
        future = self._executor.submit(copy_context().run, self._write_pinned, job, pin)
        self._writing = (pin, future)

    def _write_pinned(self, job: JobRecord, pin: str) -> StoredCheckpoint:
        """Return the checkpoint of the model pinned under a name.

        Raises :class:`SnapshotMissing` and :class:`StorageUnavailable`.
        """
        # They need torch, and a controller without jobs doesn't need that much memory.
        from vcasgd.learning.layout import Layout
        from vcasgd.learning.shards import Cut
        from vcasgd.storage.model_checkpoints import ModelCheckpoints
        from vcasgd.store.tensors.sharded import ShardedSnapshots

        assert job.facts is not None
        layout = Layout.from_json(job.facts.layout)
        cut = Cut(layout.floats, layout.parameters, job.facts.shards)
        snapshots = ShardedSnapshots(self._nodes_of(job), job.id, cut)
        whole = snapshots.pinned(pin)
        if whole is None:
            raise SnapshotMissing(f"no snapshot is pinned under the name {pin}")
        checkpoints = ModelCheckpoints(self._storage, job.id)
        stored = checkpoints.find(versions_of(whole))
        if stored is None:
            floats = partial(snapshots.pieces, whole)
            has_state = any(shard.meta.rule_state for shard in whole)
            state = partial(snapshots.state_pieces, whole) if has_state else None
            stored = checkpoints.write(whole, layout, floats, state, job.facts.adapter)
            if self._jobs.was_deleted(job.id):
                # Its other checkpoints were, too.
                checkpoints.delete(stored.name)
                raise SnapshotMissing("the job was deleted meanwhile")
        if stored.name not in self._jobs.checkpoints(job.id):
            # An earlier controller may have died before it listed it.
            self._list(job, stored, pin, whole)
        return stored

    def _list(
        self, job: JobRecord, stored: StoredCheckpoint, pin: str, whole: ModelSnapshot
    ) -> None:
        """Prune old checkpoints, write the list of the others to the ledger, and report this."""
        listed = self._jobs.checkpoints(job.id)
        listed[stored.name] = {
            "version": stored.version,
            "versions": versions_of(whole),
            "digest": stored.digest,
            "size": stored.size,
            "at": self._clock(),
            "of": pin,
            "finished_epochs": min(each.record.finished for each in whole),
            "samples": min(each.meta.totals.samples for each in whole),
        }
        protected = self._protected(job, listed) | {stored.name}
        self._checkpoints.prune(job.spec.checkpoint.keep, protected)
        left = {each.name for each in self._checkpoints.all()}
        self._jobs.set_checkpoints(
            job.id, {name: each for name, each in listed.items() if name in left}
        )
        kb = stored.size / 1e3
        self._jobs.event(
            self._job,
            "checkpoint",
            f"version {stored.version} is stored "
            f"({f'{kb / 1e3:.1f} MB' if kb >= 100 else f'{kb:.1f} kB'})",
            name=stored.name,
            version=stored.version,
        )

    def _protected(self, job: JobRecord, listed: dict[str, dict[str, Any]]) -> frozenset[str]:
        """Return the checkpoints to keep at any age: those of the best and of the final model, and
        the one to which training went back."""
        present = self._jobs.get(job.id)
        versions = {
            each.versions
            for each in present.evaluations
            if each == present.best or each.number == present.final_evaluation
        }
        needed = {name for name, each in listed.items() if tuple(each["versions"]) in versions}
        return frozenset({*needed, present.tuned.rollback_to})

    def _report_failed(self, why: str) -> None:
        if not self._failed_writes:
            self._jobs.event(
                self._job,
                "checkpoint-failed",
                f"a checkpoint can't be written: {why}; training continues, and the write is "
                "retried",
            )
        self._failed_writes += 1
        self._retry_at = self._clock() + backoff(self._failed_writes, *RETRY_SECONDS)
        log.warning("%s: checkpoint: %s", self._job, why)


def _best_pin(job: JobRecord, pins: PinnedSnapshots) -> str | None:
    """Return the pin of the best model; None if it is stored, because it is unpinned then.

    Without a metric the best model is the newest one, which is written like any other.
    """
    if job.metric is None or job.best is None:
        return None
    pin = _pin(job, job.best)
    return pin if pin in pins.whole else None


def _pin(job: JobRecord, evaluation: Evaluation) -> str:
    assert job.points is not None, "evaluated"
    return job.points.pin(evaluation.number)
