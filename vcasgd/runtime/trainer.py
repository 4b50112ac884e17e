"""Training leased subtasks: where does it stand → fetch → train → push, interval by interval."""

from __future__ import annotations

import logging
import os

import torch

from vcasgd.runtime.desk import Desk, Interrupted
from vcasgd.runtime.learner import Learner, Trained
from vcasgd.store.leases import Kind, Lease
from vcasgd.store.snapshots import encode_integers
from vcasgd.store.updates import Header, checksum

log = logging.getLogger(__name__)


class Trainer:
    """Raises :class:`~vcasgd.errors.SnapshotMissing` while there is no model,
    :class:`~vcasgd.errors.StoreUnavailable` while a server is away,
    :class:`~vcasgd.errors.Fenced` where a newer lease of the subtask exists, and
    :class:`Interrupted`; the errors of the user's code pass through."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._newest: tuple[int, int] | None = None
        self._pushes = 0

    def train(self, lease: Lease, learner: Learner) -> None:
        """From where the subtask stands to its end; the last pushes may still be on their way."""
        desk, subtask, plan = self._desk, lease.number, learner.plan
        epoch, size = plan.epoch_of(subtask), plan.size(subtask)
        position = max(
            desk.sender.begin(subtask, epoch, size, lease.token),
            # what waits here to be pushed again need not be trained again
            desk.outbox.reached(subtask, lease.token),
        )
        if position >= size:
            desk.outbox.watch(subtask, epoch, size)
            return
        desk.doing = f"training subtask {subtask}"
        learner.start_subtask()
        while position < size:
            desk.outbox.wait_for_room(lambda: not desk.may_go_on(lease), self.settle)
            self._refresh(learner)
            self._check_still_mine(lease)
            position = self._interval(lease, learner, epoch, position)

    def settle(self) -> None:
        """Looks what became of the pushed updates, and which leases are done with."""
        # waiting for the parameter server is no standstill of the user's code
        self._desk.note_progress()
        settled = self._desk.outbox.settle()
        self._newest = settled.version
        for subtask, reason in settled.rejected:
            log.warning("an update of subtask %d was rejected: %s", subtask, reason)
        self._sort_leases(settled.rework)

    def _interval(self, lease: Lease, learner: Learner, epoch: int, position: int) -> int:
        desk = self._desk
        trained = learner.train(
            lease.number,
            position,
            should_stop=lambda: not desk.may_go_on(lease),
            on_step=desk.on_step,
        )
        desk.failures = 0
        desk.samples += trained.stop - position
        self._pushes += 1
        header = self._header(lease, learner, position, trained)
        desk.outbox.submit(header, epoch, trained.payload)
        return trained.stop

    def _header(self, lease: Lease, learner: Learner, position: int, trained: Trained) -> Header:
        assert self._desk.base_version is not None
        unchanged = torch.equal(trained.integers, learner.base_integers)
        return Header(
            update=f"{self._desk.name}.{os.getpid()}.{self._pushes}",
            worker=self._desk.name,
            subtask=lease.number,
            start=position,
            stop=trained.stop,
            base=self._desk.base_version[0],
            token=lease.token,
            codec=learner.codec.name,
            size=len(trained.payload),
            checksum=checksum(trained.payload),
            layout=learner.layout_digest,
            integers="" if unchanged else encode_integers(trained.integers),
            loss_sum=trained.loss_sum,
        )

    def _refresh(self, learner: Learner) -> None:
        """The newest snapshot into the learner's base, if it is not there already."""
        self.settle()
        desk = self._desk
        if desk.base_version is not None and desk.base_version == self._newest:
            return
        snapshot = desk.snapshots.fetch(learner.base)
        learner.base_integers = snapshot.meta.integer_vector()
        desk.base_version = (snapshot.meta.version, snapshot.meta.token)

    def _check_still_mine(self, lease: Lease) -> None:
        desk = self._desk
        if lease.piece in desk.again:
            # a part of it was rejected or lost: find out anew where it stands
            raise Interrupted
        if not desk.may_go_on(lease):
            if not desk.held.has(lease):
                desk.drop_current()
            raise Interrupted

    def _sort_leases(self, rework: frozenset[int]) -> None:
        desk = self._desk
        unsettled = desk.outbox.subtasks()
        for lease in desk.held.all():
            if lease.kind is not Kind.TRAIN:
                continue
            if lease.number in rework:
                desk.again[lease.piece] = lease
            elif (
                lease != desk.current
                and lease.number not in unsettled
                and lease.piece not in desk.again
            ):
                desk.finish(lease)
