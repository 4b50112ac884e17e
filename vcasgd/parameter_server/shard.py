"""One shard of one job in the parameter server: take over, claim, publish, account.

Every step can be cut off at any line. What was blended but not published is published at the
next turn; what was published but not told to the ledger is told at the next turn; and a new
process finds in the tensors server all that it needs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from vcasgd.errors import (
    CheckpointDamaged,
    Fenced,
    InvalidUpdate,
    NotFound,
    SnapshotMissing,
    StoreUnavailable,
)
from vcasgd.parameter_server.model_state import MOST_UPDATES, ModelState, ShardConfig
from vcasgd.parameter_server.pins import Pins
from vcasgd.parameter_server.reports import Reports
from vcasgd.parameter_server.update_weight import UpdateWeight
from vcasgd.storage.checkpoints import Checkpoints
from vcasgd.store.acl import worker_key
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.tensors.push_slots import PushSlots
from vcasgd.store.tensors.snapshot import Change, Meta, Snapshot, epoch_pin, pin_text
from vcasgd.store.tensors.snapshots import Snapshots
from vcasgd.store.tensors.updates import Header, StreamEntry, UpdateReader

log = logging.getLogger(__name__)

#: between two looks at how much room the tensors server has
TEND_SECONDS = 1.0
#: where workers make do with bfloat16, no version is without its other bits for longer
EXACT_SECONDS = 1.0


class Shard:
    """Owns the parameters of one job on one store node, under one fencing token.

    :meth:`turn` raises :class:`~vcasgd.errors.StoreUnavailable` while a server is away,
    :class:`~vcasgd.errors.StoreFull` while it has no room,
    :class:`~vcasgd.errors.SnapshotMissing` where it came back empty in the middle of the turn,
    and :class:`~vcasgd.errors.StorageUnavailable` while a checkpoint is needed and can't be
    read; it may then simply be called again. It raises :class:`~vcasgd.errors.Fenced` when a
    newer parameter server has taken over.
    """

    def __init__(
        self,
        job: JobRecord,
        token: int,
        *,
        tensors: RedisClient,
        ledger: RedisClient,
        checkpoints: Checkpoints,
        job_secret: str | None = None,
        number: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if job.facts is None:
            raise ValueError(f"{job.id} has no facts yet")
        self.job, self.request = job.id, job.request
        self._token = token
        self._secret = job_secret
        self._recipe = ShardConfig(job.spec, job.facts, number)
        self._jobs = Jobs(ledger)
        self._mixing = UpdateWeight(ledger, job)
        self._checkpoints = checkpoints
        self._tensors = tensors
        self._unreplicated = False
        self._shards = job.facts.shards
        self._keys = keys = TensorKeys(job.id, number)
        self._snapshots = Snapshots(tensors, keys)
        self._reader = UpdateReader(tensors, keys)
        self._places = PushSlots(tensors, keys)
        self._pins = Pins(self._snapshots, token)
        self._reports = Reports(ledger, job.id, token, clock, shard=number, shards=job.facts.shards)
        self._model: ModelState | None = None
        #: the part of the tensors server's memory that is this job's
        self.memory_share = 1.0
        self._tended_at = self._exact_at = float("-inf")
        self._reconciled = False
        self._asked_for_initial = False
        #: versions that this process has published
        self.publications = 0

    @property
    def stream(self) -> str:
        return self._reader.stream

    @property
    def awaits_first_snapshot(self) -> bool:
        """Nobody has the model any more, and a worker was asked to make the first one again."""
        return self._model is None and self._asked_for_initial

    @property
    def version(self) -> int:
        return self._model.meta.version if self._model else 0

    # -- one turn of the loop ------------------------------------------------------------------

    def turn(self) -> int:
        """Does what there is to do; returns how many updates it dealt with."""
        model = self._loaded()
        if model is None:
            return 0
        look = self._snapshots.look()
        if look.version is None or look.version < model.meta.version:
            self._republish(model, look.version)
            return 0
        self._check_version(model, look.version, look.writer)
        if look.token != self._token:
            # taken over by another one, or a failover brought back what was before this one
            self._snapshots.takeover(self._token)
        if look.safe < look.version:
            # it was cut off between a publication and the replicas' answer
            self._snapshots.confirm(self._token, look.version)
        if model.batch.entries:
            self._publish(model, committed=look.version != model.meta.version)
        if look.wanted:
            self._complete(model)
        self._pins.serve(look, Snapshot(model.meta, model.stored_record()))
        self._tend_places()
        dealt = self._collect(model)
        if model.batch.entries:
            # decided once: a publication that has to be repeated stays what it is
            model.batch.exact = bool(model.batch.folded) or self._exact_is_due
            self._publish(model)
        elif self._exact_is_due:
            self._complete(model)
        self._watch_replicas()
        self._tell_ledger(model)
        return dealt

    def close(self) -> None:
        """The job is no longer active. Raises :class:`StoreUnavailable`."""
        # it may have been published again after the controller had removed it
        if self._is_over():
            self._snapshots.forget()

    def _watch_replicas(self) -> None:
        """Says when updates are no longer, or again, on more than one server."""
        replication = self._tensors.replication
        if replication is None or replication.holds is not self._unreplicated:
            return
        self._unreplicated = not replication.holds
        if self._unreplicated:
            text = "no replica of the tensors server answers; updates go on without"
            self._reports.say("unreplicated", text)
        else:
            self._reports.say("replicated", "the tensors server has its replica again")

    def _tend_places(self) -> None:
        if time.monotonic() - self._tended_at < TEND_SECONDS:
            return
        recipe = self._recipe
        self._places.tend(recipe.snapshot_size, recipe.payload_size, self.memory_share)
        self._tended_at = time.monotonic()

    def _tell_ledger(self, model: ModelState) -> None:
        self._reports.tell(model)
        self._reports.add_metrics(model, self._reader.waiting)
        self._mixing.follow(model)

    def _is_over(self) -> bool:
        try:
            return self._jobs.get(self.job).state.over
        except (StoreUnavailable, NotFound):
            return False

    def _check_version(self, model: ModelState, version: int, writer: int) -> None:
        # a version only counts updates: another server may have other ones under that number
        known = [(model.meta.version, model.meta.token)]
        if model.batch.applied:
            # an unpublished batch may have been committed although its answer was lost
            known.append((model.meta.version + model.batch.applied, self._token))
        if (version, writer) not in known:
            raise Fenced(f"version {version} of {self.job} was not written by this server")

    # -- taking over, coming back --------------------------------------------------------------

    def _loaded(self) -> ModelState | None:
        """The model; None while nobody has one."""
        if self._reconciled:
            return self._model
        self._snapshots.takeover(self._token)
        self._model = self._stored() or self._restored()
        if self._model is None:
            self._ask_for_initial()
            return None
        self._snapshots.forget_orphans(self._token, [self._model.meta, *self._pins.load()])
        if not self._model.meta.exact:
            text = "the parameter server before this one left its last second rounded to bfloat16"
            self._reports.say("rounded", text, version=self._model.meta.version)
        self._reports.begin(self._model)
        self._reports.reconcile(self._model)
        self._mixing.follow(self._model)
        self._reconciled = True
        return self._model

    def _stored(self) -> ModelState | None:
        weights = torch.empty(self._recipe.part.floats)
        try:
            snapshot = self._snapshots.fetch(weights)
            # nobody else publishes any more, so it is of the same version
            state = self._snapshots.fetch_state(snapshot.meta)
            return ModelState(self._recipe, snapshot, weights, state)
        except SnapshotMissing:
            return None

    def _restored(self) -> ModelState | None:
        """Neither the tensors server nor this process has the model: back to a checkpoint."""
        loaded = self._checkpoints.newest(self._say_damaged, self._shards)
        if loaded is None:
            return None
        stored, weights, state = loaded.part(self._recipe.part)
        meta = replace(stored.meta, token=self._token)
        snapshot = Snapshot(meta, stored.record)
        self._snapshots.install(self._token, meta, snapshot.record, weights, state)
        self._reports.say(
            "restored",
            f"the tensors server and its parameter server were both lost; the model is back at "
            f"version {meta.version} from checkpoint {loaded.name}",
            version=meta.version,
        )
        return ModelState(self._recipe, snapshot, weights, state)

    def _ask_for_initial(self) -> None:
        if not self._asked_for_initial:
            self._reports.ask_for_initial()
            self._asked_for_initial = True

    def _say_damaged(self, error: CheckpointDamaged) -> None:
        log.warning("%s", error)
        self._reports.say("checkpoint-damaged", f"{error.message}; the one before is used")

    def _republish(self, model: ModelState, stored: int | None) -> None:
        """The tensors server came back empty, or older after a failover, but the model is still
        in this memory."""
        if self._is_over():
            return
        self._check_newest()
        meta, record = replace(model.next_meta(self._token), exact=True), model.stored_record()
        parts = (meta, record, model.weights, model.state if meta.rule_state else None)
        if stored is None:
            self._snapshots.install(self._token, *parts, stored=False)
            self._pins.forget()
        else:
            first_open = record.finished * self._recipe.plan.subtasks_per_epoch
            if self._snapshots.replace(self._token, *parts, first_open=first_open):
                self._snapshots.forget_orphans(self._token, [meta, *self._pins.load()])
        self._reports.published(model.newly_done())
        model.published(meta)
        came_back = "empty" if stored is None else f"with version {stored}"
        self._reports.say(
            "republished",
            f"the tensors server came back {came_back}; version {meta.version} was published again",
            version=meta.version,
        )

    def _check_newest(self) -> None:
        """The fence went with the tensors server; the ledger still knows who has taken over."""
        try:
            newer = self._reports.fenced_by()
        except StoreUnavailable:
            return  # the ledger's absence stops no training
        if newer is not None:
            raise Fenced(f"a parameter server with token {newer} has taken over")

    # -- claim, check, blend -------------------------------------------------------------------

    def _collect(self, model: ModelState) -> int:
        dealt = 0
        for entry in self._reader.read(MOST_UPDATES):
            if model.batch.full:
                break
            self._take(model, entry)
            dealt += 1
        return dealt

    def _take(self, model: ModelState, entry: StreamEntry) -> None:
        header: Header | None = None
        keys: list[str] = []
        size = self._recipe.payload_size
        try:
            header = Header.parse(entry.header)
            self._check_author(header)
            keys = self._reader.payload_keys(header, size)
            model.check(header)
            at = 0
            for chunk in self._reader.receive(header, model.payload(header)):
                model.inspect(header, chunk, at)
                at += chunk.nbytes
            model.blend(entry.id, header, keys)
        except InvalidUpdate as error:
            if error.reason == "missing":
                # no fault of the worker's where the server has just come back empty
                self._snapshots.version()
            model.refuse(entry.id, header, error.reason, keys)
            self._reports.rejected(header, error)
        else:
            self._reports.applied(header.worker)

    def _check_author(self, header: Header) -> None:
        """Raises :class:`InvalidUpdate`. Without a secret a name is what it says it is."""
        if self._secret is not None:
            key = worker_key(self._secret, self.job, header.worker)
            header.check_signature(key, self._keys)

    # -- publish -------------------------------------------------------------------------------

    def _publish(self, model: ModelState, *, committed: bool = False) -> None:
        """``committed``: it already happened, only the answer to the last turn was lost."""
        meta, changed = model.next_meta(self._token), model.batch.applied > 0
        name = None
        if model.batch.folded and not self._pins.full:
            name = epoch_pin(model.record.finished_epochs)
        if not committed:
            self._commit(model, meta, name)
        if changed and meta.exact:
            self._exact_at = time.monotonic()
        self._pins.published(model.meta if changed else None, {name: meta} if name else {})
        self._reports.published(model.newly_done())
        self.publications += changed
        model.published(meta)

    @property
    def _exact_is_due(self) -> bool:
        return time.monotonic() - self._exact_at >= EXACT_SECONDS

    def _complete(self, model: ModelState) -> None:
        """Where workers make do with bfloat16: all bits of the present version, after all."""
        if not model.meta.exact:
            meta = self._snapshots.complete(model.meta, model.weights)
            self._snapshots.commit(self._token, meta, Change(base=meta.version))
            model.meta, self._exact_at = meta, time.monotonic()

    def _commit(self, model: ModelState, meta: Meta, pin: str | None) -> None:
        batch = model.batch
        spare: list[str] = []
        if batch.applied:
            self._snapshots.write(meta, model.weights, model.state)
            spare = self._pins.spare(model.meta)
        change = Change(
            base=model.meta.version,
            fields=model.changed_fields(meta),
            forget=tuple(batch.folded),
            entries=tuple(batch.entries),
            dealt=tuple(batch.dealt),
            refused=batch.refused,
            reset=model.positions_to_reset(),
            pin=pin,
            pinned=pin_text(Snapshot(meta, model.stored_record())) if pin else "",
        )
        # totals count what was refused too, so the description is written in either case
        self._snapshots.commit(self._token, meta, change, [*batch.payloads, *spare])
