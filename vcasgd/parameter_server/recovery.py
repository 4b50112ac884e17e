"""Recovery of a shard's model: from the tensors server, a checkpoint, or this process's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vcasgd.errors import (
    Cause,
    CheckpointDamaged,
    Fenced,
    JobUnreadable,
    NotFound,
    SnapshotMissing,
    StoreUnavailable,
)
from vcasgd.parameter_server.blend import ModelState, ShardConfig
from vcasgd.parameter_server.publish import Publisher
from vcasgd.parameter_server.reports import Reports
from vcasgd.storage.model_checkpoints import LoadedCheckpoint, ModelCheckpoints
from vcasgd.store.ledger.job import Failure
from vcasgd.store.ledger.tuning import Tuned
from vcasgd.store.tensors.snapshot import Meta, Record, Snapshot, SnapshotView
from vcasgd.store.tensors.snapshot_store import SnapshotStore
from vcasgd.threads import Background

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Part:
    """The shard's part of a checkpoint; tensors are float32 [part.floats]."""

    checkpoint: str
    stored: Snapshot
    weights: Tensor
    state: Tensor | None


class Recovery:
    """Recovery of one shard under one fencing token.

    ``executor`` reads checkpoints, so that a slow storage delays no other job; without one, the
    methods do. They raise :class:`~vcasgd.errors.Fenced` if a newer parameter server has taken
    over, and otherwise as :meth:`Shard.turn` does; they may then be called again.
    """

    def __init__(
        self,
        config: ShardConfig,
        snapshots: SnapshotStore,
        publisher: Publisher,
        reports: Reports,
        checkpoints: ModelCheckpoints,
        *,
        token: int,
        shards: int,
        executor: Executor | None = None,
    ) -> None:
        self._config = config
        self._snapshots = snapshots
        self._publisher = publisher
        self._reports = reports
        self._checkpoints = checkpoints
        self._token = token
        #: Number of the shard, and that of all shards.
        self._place = config.part.shard, shards
        #: A checkpoint that is read: its name, or "" for the newest one. The result is empty if
        #: there is none.
        self._reading = Background[tuple[_Part, ...]](executor)
        self._read_name = ""
        #: Description of a model that is being published again, and how the server came back;
        #: None once the server has answered.
        self._unanswered: tuple[Meta, str] | None = None
        #: The last rollback whose model can't be read.
        self._impossible = 0
        #: True while the model is lost and a worker has been asked to create it again.
        self.awaits_first_snapshot = False

    @property
    def reading(self) -> bool:
        """True while a checkpoint is read that the shard waits for."""
        return self._reading.running

    def load(self) -> ModelState | None:
        """Take over the shard and return its model; None until it is read, or a worker has
        created it."""
        self._snapshots.takeover(self._token)
        model = self._from_snapshot()
        if model is None:
            newest = partial(self._checkpoints.newest, self._report_damaged, *self._place)
            parts = self._read("", newest)
            if parts is None:
                return None
            if not parts:
                if not self.awaits_first_snapshot:
                    self._reports.request_initial_model()
                self.awaits_first_snapshot = True
                return None
            model = self._from_checkpoint(*parts)
        self.awaits_first_snapshot = False
        self._snapshots.delete_orphans(self._token, [model.meta, *self._publisher.load_pins()])
        if not model.meta.exact:
            text = "the previous parameter server left its last second rounded to bfloat16"
            self._reports.add_event("rounded", text, version=model.meta.version)
        self._reports.begin(model)
        self._reports.reconcile(model)
        return model

    def _from_snapshot(self) -> ModelState | None:
        weights = torch.empty(self._config.part.floats)
        try:
            snapshot = self._snapshots.fetch(weights)
            # After the takeover no other server publishes, so the state has the same version.
            state = self._snapshots.fetch_state(snapshot.meta)
            followed = self._snapshots.fetch_followed(snapshot.meta)
            # Chunks of older steps may be missing.
            meta = replace(snapshot.meta, steps=())
            snapshot = replace(snapshot, meta=meta)
            return ModelState(self._config, snapshot, weights, state, followed)
        except SnapshotMissing:
            return None
        except CheckpointDamaged as error:
            # A worker may have written the applied record.
            raise JobUnreadable(f"the stored snapshot can't be read: {error.message}") from error

    def _read(
        self, name: str, call: Callable[[], LoadedCheckpoint | None]
    ) -> tuple[_Part, ...] | None:
        """Return what a call reads; None until it is there. Raises the call's errors."""
        if self._reading.busy and self._read_name != name:
            with suppress(Exception):  # the caller needs another one now
                self._reading.take()
            if self._reading.busy:
                return None
        if not self._reading.busy:
            self._read_name = name
            self._reading.start(lambda: self._part_of(call()))
        return self._reading.take()

    def _part_of(self, loaded: LoadedCheckpoint | None) -> tuple[_Part, ...]:
        if loaded is None:
            return ()
        snapshot = loaded.whole[self._config.part.shard]
        return (_Part(loaded.name, snapshot, loaded.floats, loaded.state),)

    def _from_checkpoint(self, part: _Part) -> ModelState:
        """Return to the newest checkpoint, because no server has the model: both were lost, or
        the stack was stopped."""
        # A checkpoint has only the exact model.
        meta = replace(part.stored.meta, token=self._token, stepped=False)
        snapshot = Snapshot(meta, part.stored.record)
        self._snapshots.install(self._token, meta, snapshot.record, part.weights, part.state)
        lost = max(0, self._reports.reported_version() - meta.version)
        after = f"; {lost} later updates are trained again" if lost else ", with all updates"
        self._reports.add_event(
            "restored",
            f"no server had the model in memory; it is back at version {meta.version} from "
            f"checkpoint {part.checkpoint}{after}",
            version=meta.version,
        )
        return ModelState(self._config, snapshot, part.weights, part.state)

    # -- earlier models ------------------------------------------------------------------------

    def follow(self, model: ModelState, tuned: Tuned) -> ModelState | None:
        """Go back to an earlier model if the controller has decided so; return the present one.

        Returns None while the earlier one is read; until then, nothing more may be applied. A
        parameter server that lost the rollback, because it was restarted or went back to a
        checkpoint, repeats it.
        """
        if tuned.rollbacks <= max(model.meta.rollbacks, self._impossible):
            return model
        name = tuned.rollback_to
        try:
            parts = self._read(name, lambda: self._checkpoints.read(name, *self._place))
        except (CheckpointDamaged, NotFound) as error:
            cause = "an owner's work was wrong" if tuned.restores else "training diverged"
            why = f"{cause}, and the model to go back to can't be read: {error.message}"
            self._reports.failed(Failure("parameter server", "rollback", why, "", Cause.JOB))
            self._impossible = tuned.rollbacks
            return model
        if not parts:
            return None
        return (self._restore if tuned.restores else self._roll_back)(model, tuned, *parts)

    def _roll_back(self, model: ModelState, tuned: Tuned, part: _Part) -> ModelState:
        """Go back to an earlier model because training diverged."""
        integers = part.stored.meta.integer_vector()
        model.roll_back(
            *(part.weights, integers, tuned.rollbacks, tuned.restorations), average=part.state
        )
        return model

    def _restore(self, model: ModelState, tuned: Tuned, part: _Part) -> ModelState:
        """Go back to an earlier model because an owner's work was wrong.

        The applied record goes back, too: all samples since then are open again.
        """
        meta = replace(
            part.stored.meta,
            version=model.meta.version,
            totals=replace(part.stored.meta.totals, rejected=model.meta.totals.rejected),
            rollbacks=tuned.rollbacks,
            restorations=tuned.restorations,
        )
        snapshot = Snapshot(meta, part.stored.record)
        restored = ModelState(self._config, snapshot, part.weights, part.state)
        restored.factor = model.factor
        restored.batch.applied, restored.batch.jumps = 1, True
        restored.end_batch()
        published = replace(restored.next_meta(self._token), exact=True)
        self._replace(restored, published)
        restored.published(published)
        # What was pinned since then is no longer in the model's history.
        for name in self._snapshots.pins():
            number = self._config.points.number_of(name)
            if number is not None and number > restored.point:
                self._snapshots.unpin(name)
        self._publisher.replaced(model.meta)
        self._reports.begin(restored)
        self._reports.reconcile(restored)
        return restored

    def _replace(self, model: ModelState, meta: Meta) -> bool:
        """Store a model in place of an older version; return False if there is none."""
        return self._snapshots.replace(
            self._token, *_parts(model, meta), first_open=model.record.first_open
        )

    def _report_damaged(self, error: CheckpointDamaged) -> None:
        log.warning("%s", error)
        text = f"{error.message}; the previous one is used"
        self._reports.add_event("checkpoint-damaged", text)

    # -- a tensors server that went back in time -----------------------------------------------

    def confirm(self, model: ModelState, view: SnapshotView) -> bool:
        """Return True if the tensors server has the published version, and is this server's.

        If it has lost the version, it is published again.
        """
        if view.version is None or view.version < model.meta.version:
            if not self._reports.job_is_over():
                self._republish(model, view.version)
            return False
        # A version only counts updates: another server may have others under the same number.
        own = [(model.meta.version, model.meta.token)]
        if model.batch.applied:
            # An unpublished batch may have been committed although the answer was lost.
            own.append((model.meta.version + model.batch.applied, self._token))
        if (view.version, view.writer) not in own:
            raise Fenced(f"version {view.version} was not written by this server")
        self._resume_republication(model)
        if view.token != self._token:
            # Another server took over, or a failover brought back the state before this one.
            self._snapshots.takeover(self._token)
        if view.safe < view.version:
            # An earlier turn ended between the publication and the replicas' answer. A takeover
            # waits until they have it and all earlier writes.
            self._snapshots.takeover(self._token)
            self._snapshots.advance(self._token, view.version)
        return True

    def _republish(self, model: ModelState, stored: int | None) -> None:
        """Publish the model in memory again, with its batch.

        ``stored`` is the version on the tensors server, which came back empty (None) or, after a
        failover, with an older version.
        """
        with suppress(StoreUnavailable):  # Training continues without the ledger.
            self._reports.check_newest()
        model.end_batch()
        # The server may have lost the chunks of steps.
        meta = replace(model.next_meta(self._token), exact=True, steps=())
        self._unanswered = meta, "empty" if stored is None else f"with version {stored}"
        if stored is None:
            done = self._snapshots.install(self._token, *_parts(model, meta), stored=False)
        else:
            done = self._replace(model, meta)
        if done:
            self._end_republication(model)

    def _resume_republication(self, model: ModelState) -> None:
        """End a republication whose answer was lost, once the server has a version."""
        if self._unanswered is None:
            return
        if self._snapshots.read().meta == self._unanswered[0]:
            self._end_republication(model)
        else:
            self._unanswered = None  # Nothing was stored.

    def _end_republication(self, model: ModelState) -> None:
        assert self._unanswered is not None
        meta, found = self._unanswered
        self._snapshots.delete_orphans(self._token, [meta, *self._publisher.load_pins()])
        self._unanswered = None
        self._reports.published(model.batch.done, model.point)
        model.published(meta)
        self._reports.add_event(
            "republished",
            f"the tensors server came back {found}; version {meta.version} was published again",
            version=meta.version,
        )


def _parts(
    model: ModelState, meta: Meta
) -> tuple[Meta, Record, Tensor, Tensor | None, Tensor | None]:
    """Return what the tensors server stores of a model under a description."""
    state = model.state if meta.rule_state else None
    followed = model.followed if meta.stepped else None
    return meta, model.stored_record(), model.weights, state, followed
