"""One shard of one job in the parameter server: claims updates, blends them, and publishes.

Each step may be interrupted at any line. The next turn publishes blended updates that were not
published, and reports to the ledger what was published but not reported. A new process finds
everything that it needs in the tensors server.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Executor

from vcasgd.errors import (
    CheckpointDamaged,
    Fenced,
    InvalidUpdate,
    JobUnreadable,
    NotFound,
    StoreUnavailable,
)
from vcasgd.faults import Cause, fault_of
from vcasgd.limits import MAX_CONTENT_BYTES, MAX_HEADERS_BYTES
from vcasgd.parameter_server.model_state import MAX_UPDATES, ModelState, ShardConfig
from vcasgd.parameter_server.pins import Pins
from vcasgd.parameter_server.publish import Publisher
from vcasgd.parameter_server.recovery import Recovery
from vcasgd.parameter_server.reports import Reports
from vcasgd.parameter_server.round_members import RoundMembers
from vcasgd.parameter_server.verification import verification_of
from vcasgd.storage.model_checkpoints import ModelCheckpoints
from vcasgd.store.acl import worker_key
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.job import Failure, JobRecord
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import WorkKind
from vcasgd.store.ledger.tuning import Tuned, Tunings
from vcasgd.store.quotas import ContentQuota
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.push_slots import PushSlots
from vcasgd.store.tensors.snapshot import SnapshotView
from vcasgd.store.tensors.snapshot_store import SnapshotStore
from vcasgd.store.tensors.updates import Arrivals, StreamEntry, UpdateReader
from vcasgd.threads import Background

#: Seconds between two updates of the number of push slots.
SLOTS_SECONDS = 1.0
#: Seconds between two looks at how much workers have written.
CHECK_SECONDS = 1.0
#: Seconds between two reads of the tuned values.
TUNED_SECONDS = 0.5
#: Seconds between two looks at the state in the tensors server while updates arrive. Publications
#: are fenced, so a look only finds earlier what they would find, and pins that are requested.
VIEW_SECONDS = 0.1
#: Times that an update may fail for no known reason. The first may be accidents, but without a
#: limit, one update would hold up the whole job.
UPDATE_ATTEMPTS = 3
#: Reason for the rejection of an update that failed so often.
POISON = "poison"
#: Seconds between two reports to the ledger while no subtask is completed.
REPORT_SECONDS = 0.2


class Shard:
    """Owner of a job's parameters on one store node, under one fencing token.

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
        self._secret = job_secret
        self._config = ShardConfig(job.spec, job.facts, number)
        self._jobs = Jobs(prompt or ledger)
        self._tunings = Tunings(ledger, job.id)
        self._tuned = Tuned()
        self._tuned_read_at = float("-inf")
        self._tensors = tensors
        self._unreplicated = False
        self._keys = keys = TensorKeys(job.id, number)
        self._snapshots = SnapshotStore(tensors, keys)
        self._reader = UpdateReader(tensors, keys)
        self._slots = PushSlots(tensors, keys)
        self._slots_updated_at = float("-inf")
        headers = {keys.stream: MAX_HEADERS_BYTES}
        content = dict.fromkeys(keys.written_by_workers, MAX_CONTENT_BYTES) | headers
        self._content = ContentQuota(tensors, content, CHECK_SECONDS)
        self._pins = Pins(self._snapshots, token)
        self._reports = Reports(
            ledger,
            job.id,
            token,
            clock,
            created_at=job.created_at,
            prompt=prompt,
            shard=number,
            shards=job.facts.shards,
        )
        self._publisher = Publisher(
            self._config.points, self._snapshots, self._pins, self._reports, token
        )
        self._recovery = Recovery(
            self._config,
            self._snapshots,
            self._pins,
            self._reports,
            checkpoints,
            token=token,
            shards=job.facts.shards,
            executor=readers,
        )
        self._verification = verification_of(
            job.spec, keys, job.facts.shards, prompt or ledger, tensors, self._reports
        )
        self._background = Background[Tuned | None](executor)
        self._reported_at = float("-inf")
        #: The last look at the tensors server, and the last one without an open batch.
        self._viewed_at = self._served_at = float("-inf")
        self._model: ModelState | None = None
        #: How often updates failed for no known reason, by their entries in the stream.
        self._attempts: Counter[str] = Counter()
        #: The last of these failures, and its traceback.
        self._failure = ("", "")
        #: The last rollback whose model can't be read.
        self._impossible = 0
        self._members = RoundMembers()
        #: The job's part of the tensors server's memory.
        self.memory_share = 1.0

    @property
    def stream(self) -> str:
        """Key of the stream of updates."""
        return self._reader.stream

    @property
    def position(self) -> tuple[str, str]:
        """The stream, and the entry after which a new one has to be waited for."""
        return self._reader.stream, self._cursor

    @property
    def due_in(self) -> float:
        """Seconds after which the shard needs a turn even without a new update."""
        deadline = self._members.deadline
        return float("inf") if deadline is None else max(0.0, deadline - time.monotonic())

    @property
    def waiting_seconds(self) -> float:
        """For how long an open round has waited for missing workers."""
        return self._members.waiting_seconds(time.monotonic())

    @property
    def _cursor(self) -> str:
        # Entries of an open round stay in the stream until it is published. The next round starts
        # from the beginning, because after a failover, new entries can have older IDs.
        return self._model.batch.last_read if self._model else "0-0"

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
        self._members.lose(workers)
        self._verification.lose(workers)
        if self._model is not None:
            self._model.lose(workers)

    def superseded(self) -> bool:
        """Return True if the fence shows that a newer parameter server has taken over."""
        return self._snapshots.fence() > self._token

    # -- one turn of the loop ------------------------------------------------------------------

    def turn(self, arrivals: Arrivals | None = None) -> int:
        """Do all pending work once, and return the number of processed updates.

        ``arrivals`` are new updates; without them, the turn reads them, and does everything that
        another one may put off for a moment.
        """
        self._check_content()
        model = self._loaded()
        if model is None:
            return 0
        if self._view_is_due(model, arrivals) and not self._look(model):
            return 0
        self._update_slots()
        rolled_back = self._roll_back(model)
        if rolled_back is None:
            return 0
        model = rolled_back
        self._verification.turn(model)
        processed = self._collect(model, arrivals)
        if model.batch.pending and self._round_is_complete(model):
            self._close(model)
            self._publish(model)
        elif not model.batch.pending and self._publisher.exact_is_due:
            self._publisher.complete(model)
        self._watch_replicas()
        if not model.batch.pending:
            self._report(model, at_once=arrivals is None or self._reports.urgent)
        return processed

    def _check_content(self) -> None:
        """Raise :class:`JobUnreadable` if workers wrote more than anyone should read."""
        if why := self._content.enforce():
            raise JobUnreadable(why)

    def _view_is_due(self, model: ModelState, arrivals: Arrivals | None) -> bool:
        last = self._viewed_at if model.batch.pending else self._served_at
        due = time.monotonic() - last >= VIEW_SECONDS
        return due or arrivals is None or model.batch.closed

    def _look(self, model: ModelState) -> bool:
        """Compare the tensors server with the memory, and do what is requested there.

        Returns False if the server has lost the model.
        """
        view = self._snapshots.view()
        if not self._is_stored(model, view):
            return False
        if model.batch.closed:
            self._publish(model, committed=view.version != model.meta.version)
        self._viewed_at = time.monotonic()
        if not model.batch.pending:
            # The description of the published version is that of the memory.
            if view.pin_requests:
                self._publisher.complete(model)
            self._pins.serve(view, model.meta, model.stored_record)
            self._served_at = self._viewed_at
        return True

    def _is_stored(self, model: ModelState, view: SnapshotView) -> bool:
        """Return True if the tensors server has the published version, and is this server's.

        If it has lost the version, it is published again.
        """
        if view.version is None or view.version < model.meta.version:
            if not self._is_over():
                self._recovery.republish(model, view.version)
                self._members.end()
            return False
        self._check_version(model, view.version, view.writer)
        self._recovery.resume_republication(model)
        if view.token != self._token:
            # Another server took over, or a failover brought back the state before this one.
            self._snapshots.takeover(self._token)
        if view.safe < view.version:
            # An earlier turn ended between the publication and the replicas' answer.
            self._snapshots.confirm(self._token, view.version)
        return True

    def _round_is_complete(self, model: ModelState) -> bool:
        return (
            not self._config.rule.rounds
            or model.full
            or model.record.complete
            or self._members.complete(time.monotonic())
        )

    def _close(self, model: ModelState) -> None:
        # Decided once, so that a repeated publication stays the same.
        at_point = model.batch.point is not None
        model.batch.exact = at_point or self._publisher.exact_is_due
        model.close()

    def _publish(self, model: ModelState, *, committed: bool = False) -> None:
        self._publisher.publish(model, committed=committed)
        self._members.end()
        self._attempts.clear()

    def close(self) -> None:
        """Release the shard of a job that is no longer active.

        Raises :class:`StoreUnavailable`.
        """
        # It may have been republished after the controller deleted it.
        if self._is_over():
            self._snapshots.delete_all()

    def _loaded(self) -> ModelState | None:
        if self._model is None:
            self._model = self._recovery.load()
            if self._model is not None:
                self._report(self._model, at_once=True)
        return self._model

    def _check_version(self, model: ModelState, version: int, writer: int) -> None:
        # A version only counts updates: another server may have others under the same number.
        own = [(model.meta.version, model.meta.token)]
        if model.batch.applied:
            # An unpublished batch may have been committed although the answer was lost.
            own.append((model.meta.version + model.batch.applied, self._token))
        if (version, writer) not in own:
            raise Fenced(f"version {version} of {self.job} was not written by this server")

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

    def _update_slots(self) -> None:
        if time.monotonic() - self._slots_updated_at < SLOTS_SECONDS:
            return
        config = self._config
        self._slots.update(config.snapshot_size, config.payload_size, self.memory_share)
        self._slots_updated_at = time.monotonic()

    def _report(self, model: ModelState, *, at_once: bool) -> None:
        """Take the result of the last report, and start the next one if it is time."""
        self._take_report(model)
        due = at_once or time.monotonic() - self._reported_at >= REPORT_SECONDS
        if due and not self._background.busy:
            self._reported_at = time.monotonic()
            send = self._reports.report(model, self._reader.waiting)

            def report() -> Tuned | None:
                send()
                return self._read_tuned()

            self._background.start(report)
            self._take_report(model)

    def _take_report(self, model: ModelState) -> None:
        try:
            tuned = self._background.take()
        except Exception:
            self._reports.keep()
            raise
        if tuned is not None:
            self._use_tuned(model, tuned)

    def _read_tuned(self) -> Tuned | None:
        """Return the values that the controller has tuned; None if it is not time to read them.

        Raises :class:`StoreUnavailable`.
        """
        if time.monotonic() - self._tuned_read_at < TUNED_SECONDS:
            return None
        tuned = self._tunings.read()
        self._tuned_read_at = time.monotonic()
        return tuned

    def _use_tuned(self, model: ModelState, tuned: Tuned) -> None:
        self._tuned, model.factor = tuned, tuned.mixing
        self._verification.exclude(tuned.suspects)

    def _roll_back(self, model: ModelState) -> ModelState | None:
        """Go back to an earlier model if the controller has decided so; return the present one.

        Returns None while the earlier one is read; until then, nothing more is applied. A parameter
        server that lost the rollback, because it was restarted or went back to a checkpoint,
        repeats it. Raises :class:`StorageUnavailable`.
        """
        tuned = self._tuned
        if tuned.rollbacks <= max(model.meta.rollbacks, self._impossible):
            return model
        try:
            if not tuned.restores:
                return self._recovery.roll_back(model, tuned)
            restored = self._recovery.restore(model, tuned)
            if restored is not None:
                # Updates of an open round stay in the stream, and are refused.
                self._model = restored
                self._members.end()
                self._verification.restart()
            return restored
        except (CheckpointDamaged, NotFound) as error:
            cause = "an owner's work was wrong" if tuned.restores else "training diverged"
            why = f"{cause}, and the model to go back to can't be read: {error.message}"
            failure = Failure("parameter server", "rollback", why, "", Cause.JOB)
            self._jobs.report_failure(self.job, failure)
            self._impossible = tuned.rollbacks
        return model

    def _is_over(self) -> bool:
        try:
            return self._jobs.get(self.job).state.over
        except (StoreUnavailable, NotFound):
            return False

    # -- claim, check, blend -------------------------------------------------------------------

    def _collect(self, model: ModelState, arrivals: Arrivals | None) -> int:
        processed = 0
        # A publication or rollback of this turn has moved the cursor.
        if arrivals is None or arrivals.after != self._cursor:
            arrivals = Arrivals(self._cursor, self._reader.read(MAX_UPDATES, self._cursor))
        for entry in arrivals.entries:
            if model.full:
                break
            processed += self._take(model, entry)
        return processed

    def _take(self, model: ModelState, entry: StreamEntry) -> bool:
        """Process an update; return False if it is left to the next round.

        After any error but :class:`InvalidUpdate`, the next turn processes it again. If it is not
        the store's, it does so at most :data:`UPDATE_ATTEMPTS` times.
        """
        header: Header | None = None
        keys: list[str] = []
        size, blending = self._config.payload_size, False
        try:
            header = Header.parse(entry.header)
            self._check_author(header)
            if model.belongs_to_next(header):
                model.batch.last_read = entry.id
                return False
            keys = self._reader.payload_keys(header, size)
            if self._attempts[entry.id] >= UPDATE_ATTEMPTS:
                raise self._poison(entry, header)
            model.check(header)
            at = 0
            for chunk in self._reader.receive(header, model.payload(header)):
                model.inspect(header, chunk, at)
                at += chunk.nbytes
            self._verification.check(header, model)
            version, blending = model.meta.version, True
            model.blend(entry.id, header, keys)
            self._members.arrive(header.worker, header.interval_seconds, time.monotonic())
        except InvalidUpdate as error:
            if error.reason == "missing":
                # Raises SnapshotMissing if the server came back empty; the worker is innocent.
                self._snapshots.version()
            model.refuse(entry.id, header, error.reason, keys)
            model.batch.last_read = entry.id
            self._reports.rejected(header, error)
        except Exception as error:
            if fault_of(error) is Cause.WORK:
                self._note_failure(entry, error, blending)
            raise
        else:
            # At once: an error below must not have the entry processed again.
            model.batch.last_read = entry.id
            self._reports.applied(header.worker)
            self._verification.applied(header, version)
        return True

    def _note_failure(self, entry: StreamEntry, error: Exception, blending: bool) -> None:
        """Count a failure of an update. Load the model again if it failed while blending."""
        self._attempts[entry.id] += 1
        self._failure = f"{type(error).__name__}: {error}", traceback.format_exc()
        if blending:
            # A part of it may be in the model. The updates of the batch are still in the stream.
            self._model = None
            self._members.end()
            self._verification.restart()

    def _poison(self, entry: StreamEntry, header: Header) -> InvalidUpdate:
        """Return why an update is refused that failed too often, and report it to the job once."""
        why, trace = self._failure
        text = (
            f"update {header.update}, samples {header.start} to {header.stop} of subtask "
            f"{header.subtask}, failed {UPDATE_ATTEMPTS} times: {why}"
        )
        if self._attempts[entry.id] == UPDATE_ATTEMPTS:
            self._attempts[entry.id] += 1
            piece = f"{WorkKind.TRAIN}:{header.subtask}"
            self._reports.failed(Failure(header.worker, piece, text, trace, Cause.WORK))
        return InvalidUpdate(text, reason=POISON)

    def _check_author(self, header: Header) -> None:
        """Check the signature, if workers have keys. Raises :class:`InvalidUpdate`."""
        if self._secret is not None:
            key = worker_key(self._secret, self.job, header.worker)
            header.check_signature(key, self._keys)
