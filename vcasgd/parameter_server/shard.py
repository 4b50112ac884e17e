"""One shard of one job in the parameter server, and the way of its updates.

A turn collects updates from the stream (``receive``), which checks each and blends it into the
model (``blend``), publishes the batch once its round is complete (``publish``), and reports
it to the ledger (``reports``). ``recovery`` finds the model again, wherever it was lost.

Each step may be interrupted at any line. The next turn publishes blended updates that were not
published, and reports to the ledger what was published but not reported. A new process finds
everything that it needs in the tensors server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor

from vcasgd.errors import JobUnreadable
from vcasgd.limits import MAX_CONTENT_BYTES, MAX_HEADERS_BYTES
from vcasgd.parameter_server.blend import ModelState, ShardConfig
from vcasgd.parameter_server.publish import Publisher
from vcasgd.parameter_server.receive import Collector
from vcasgd.parameter_server.recovery import Recovery
from vcasgd.parameter_server.reports import REPORT_SECONDS, Reports
from vcasgd.parameter_server.verification import verification_of
from vcasgd.storage.model_checkpoints import ModelCheckpoints
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.tuning import Tuned
from vcasgd.store.quotas import ContentQuota
from vcasgd.store.tensors.snapshot_store import SnapshotStore
from vcasgd.store.tensors.updates import Arrivals, PushSlots, UpdateReader

#: Seconds between two updates of the number of push slots, and two looks at how much workers have
#: written.
UPKEEP_SECONDS = 1.0
#: Seconds between two looks at the state in the tensors server while updates arrive. Publications
#: are fenced, so a look only finds earlier what they would find, and pins that are requested.
VIEW_SECONDS = 0.1


class Shard:
    """Owner of one shard of a job's parameters, under one fencing token.

    :meth:`turn` raises :class:`~vcasgd.errors.StoreUnavailable` while a server is unavailable,
    :class:`~vcasgd.errors.StoreFull` while it is full,
    :class:`~vcasgd.errors.SnapshotMissing` if it came back empty during the turn, and
    :class:`~vcasgd.errors.StorageUnavailable` while a required checkpoint can't be read; you may
    then call it again. It raises :class:`~vcasgd.errors.Fenced` if a newer parameter server has
    taken over.
    """

    def __init__(
        self,
        job: JobRecord,
        token: int,
        *,
        tensors: RedisClient,
        ledger: RedisClient,
        checkpoints: ModelCheckpoints,
        prompt: RedisClient | None = None,
        job_secret: str | None = None,
        number: int = 0,
        clock: Callable[[], float] = time.time,
        executor: Executor | None = None,
        readers: Executor | None = None,
    ) -> None:
        """``executor`` reports to the ledger, and ``readers`` read checkpoints; without them,
        :meth:`turn` does.

        ``prompt`` connects to the ledger for calls that a turn has to wait for; default ``ledger``.
        """
        if job.facts is None:
            raise ValueError(f"{job.id} has no facts yet")
        self.job, self.request = job.id, job.request
        self._token = token
        #: The job's shards on this store node.
        self.shards_here = job.facts.shards_beside(number)
        self._config = config = ShardConfig(job.spec, job.facts, number)
        keys, shards, here = TensorKeys(job.id, number), job.facts.shards, len(self.shards_here)
        #: All of them together look and report as often as one.
        self._view_seconds = VIEW_SECONDS * here
        self._upkeep_seconds = UPKEEP_SECONDS * here
        self._tensors = tensors
        self._snapshots = SnapshotStore(tensors, keys)
        self._reader = UpdateReader(tensors, keys)
        #: Key of the stream of updates.
        self.stream = keys.stream
        self._slots = PushSlots(tensors, keys)
        headers = {keys.stream: MAX_HEADERS_BYTES}
        content = dict.fromkeys(keys.written_by_workers, MAX_CONTENT_BYTES) | headers
        self._content = ContentQuota(tensors, content)
        self._reports = reports = Reports(
            *(ledger, job.id, token, clock),
            created_at=job.created_at,
            prompt=prompt,
            shard=number,
            shards=shards,
            is_first=number == self.shards_here.start,
            period=REPORT_SECONDS * (here if number else 1),
            executor=executor,
        )
        self._publisher = Publisher(config.points, self._snapshots, reports, token)
        self._recovery = Recovery(
            *(config, self._snapshots, self._publisher, reports, checkpoints),
            token=token,
            shards=shards,
            executor=readers,
        )
        spec = job.spec.with_gpus(job.facts.gpus)
        self._verification = verification_of(spec, keys, shards, prompt or ledger, tensors, reports)
        self._collector = Collector(
            keys, job_secret, self._snapshots, self._reader, reports, self._verification
        )
        #: Times of the last upkeep, the last look at the tensors server, and the last one without
        #: an open batch.
        self._kept_up_at = self._viewed_at = self._served_at = float("-inf")
        self._unreplicated = False
        #: Failed turns in a row, and when the next one is due, by :func:`time.monotonic`.
        self.failures, self.retry_at = 0, 0.0
        self._tuned = Tuned()
        self._model: ModelState | None = None
        #: The job's part of the tensors server's memory.
        self.memory_share = 1.0

    @property
    def position(self) -> tuple[str, str]:
        """The stream, and the entry after which a new one has to be waited for."""
        # Entries of an open round stay in the stream until it is published. The next round starts
        # from the beginning, because after a failover, new entries can have older IDs.
        return self.stream, self._model.batch.last_read if self._model else "0-0"

    @property
    def due_in(self) -> float:
        """Seconds after which the shard needs a turn even without a new update."""
        deadline = self._model.members.deadline if self._model else None
        return float("inf") if deadline is None else max(0.0, deadline - time.monotonic())

    @property
    def waiting_seconds(self) -> float:
        """For how long an open round has waited for missing workers."""
        return self._model.members.waiting_seconds(time.monotonic()) if self._model else 0.0

    @property
    def awaits_first_snapshot(self) -> bool:
        """True while the model is lost and a worker has been asked to create it again."""
        return self._recovery.awaits_first_snapshot

    @property
    def reading(self) -> bool:
        """True while a checkpoint is read, without which a turn can do nothing."""
        return self._recovery.reading

    @property
    def version(self) -> int:
        """The published version, 0 without a model."""
        return self._model.meta.version if self._model else 0

    @property
    def publications(self) -> int:
        """Number of versions that this process has published."""
        return self._publisher.publications

    def lose(self, workers: Collection[str]) -> None:
        """Wait for lost workers no longer."""
        self._verification.lose(workers)
        if self._model is not None:
            self._model.members.lose(workers)

    def superseded(self) -> bool:
        """Return True if the fence shows that a newer parameter server has taken over."""
        return self._snapshots.fence() > self._token

    def close(self) -> None:
        """Release the shard of a job that is no longer active.

        Raises :class:`~vcasgd.errors.StoreUnavailable`.
        """
        # It may have been republished after the controller deleted it.
        if self._reports.job_is_over():
            self._snapshots.delete_all()

    # -- one turn of the loop ------------------------------------------------------------------

    def turn(self, arrivals: Arrivals | None = None) -> int:
        """Do all pending work once, and return the number of processed updates.

        ``arrivals`` are new updates; without them, the turn reads them, and does everything that
        another one may put off for a moment.
        """
        self._keep_up()
        model = self._loaded()
        if model is None or (self._view_is_due(model, arrivals) and not self._look(model)):
            return 0
        following = self._recovery.follow(model, self._tuned)
        if following is None:
            return 0
        if following is not model:
            # Updates of an open round stay in the stream, and are refused.
            model = self._model = following
            self._verification.restart()
        self._verification.turn(model)
        processed = self._collector.collect(model, arrivals)
        if model.batch.pending and self._round_is_complete(model):
            self._publish(model)
        elif not model.batch.pending and self._publisher.exact_is_due:
            self._publisher.complete(model)
        self._watch_replicas()
        if not model.batch.pending:
            self._report(model, at_once=arrivals is None)
        return processed

    def _keep_up(self) -> None:
        """Set the number of push slots; raise :class:`JobUnreadable` if workers wrote more than
        anyone should read."""
        if time.monotonic() - self._kept_up_at < self._upkeep_seconds:
            return
        if why := self._content.enforce():
            raise JobUnreadable(why)
        config = self._config
        self._slots.update(config.snapshot_size, config.payload_size, self.memory_share)
        self._kept_up_at = time.monotonic()

    def _loaded(self) -> ModelState | None:
        if self._model is not None and self._model.torn:
            # The updates of its batch are still in the stream.
            self._model = None
            self._verification.restart()
        if self._model is None:
            self._model = self._recovery.load()
            if self._model is not None:
                self._report(self._model, at_once=True)
        return self._model

    def _view_is_due(self, model: ModelState, arrivals: Arrivals | None) -> bool:
        last = self._viewed_at if model.batch.pending else self._served_at
        due = time.monotonic() - last >= self._view_seconds
        return due or arrivals is None or model.batch.closed

    def _look(self, model: ModelState) -> bool:
        """Compare the tensors server with the memory, and do what is requested there.

        Returns False if the server has lost the model.
        """
        view = self._snapshots.view()
        if not self._recovery.confirm(model, view):
            return False
        if model.batch.closed:
            self._publish(model, committed=view.version != model.meta.version)
        self._viewed_at = time.monotonic()
        if not model.batch.pending:
            # The description of the published version is that of the memory.
            if view.pin_requests:
                self._publisher.complete(model)
            self._publisher.serve_pins(view, model)
            self._served_at = self._viewed_at
        return True

    def _round_is_complete(self, model: ModelState) -> bool:
        return (
            not self._config.rule.rounds
            or model.full
            or model.record.complete
            or model.members.complete(time.monotonic())
        )

    def _publish(self, model: ModelState, *, committed: bool = False) -> None:
        self._publisher.publish(model, committed=committed)
        self._collector.published()

    def _watch_replicas(self) -> None:
        """Report when updates start or stop being replicated."""
        replication = self._tensors.replication
        if replication is None or replication.holds is not self._unreplicated:
            return
        self._unreplicated = not replication.holds
        if self._unreplicated:
            text = "no replica of the tensors server answers; training continues without one"
            self._reports.add_event("unreplicated", text)
        else:
            self._reports.add_event("replicated", "the tensors server has its replica again")

    def _report(self, model: ModelState, *, at_once: bool) -> None:
        tuned = self._reports.exchange(model, self._reader.waiting, at_once=at_once)
        if tuned is not None:
            self._tuned, model.factor = tuned, tuned.mixing
            self._verification.exclude(tuned.suspects)
