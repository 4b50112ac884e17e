"""Training leased subtasks: where does it stand → fetch → train → push, interval by interval.

Each shard has a position of its own in a subtask. Mostly they are the same; where they are not,
an interval is pushed to those shards only that lack it (:mod:`vcasgd.learning.shards`).
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from functools import partial
from statistics import median

import torch

from vcasgd.learning.shards import Step, next_step
from vcasgd.store.ledger.leases import Lease, WorkKind
from vcasgd.store.tensors.snapshot import encode_integers
from vcasgd.store.tensors.updates import Header
from vcasgd.worker.context import WorkerContext, WorkInterrupted
from vcasgd.worker.learner import Base, Learner, Trained

log = logging.getLogger(__name__)

#: intervals over which the speed of a worker is measured: their median, so that one that waited
#: for its data or was frozen does not count
SPEED_INTERVALS = 5


class Trainer:
    """Raises :class:`~vcasgd.errors.SnapshotMissing` while there is no model,
    :class:`~vcasgd.errors.StoreUnavailable` while a server is away,
    :class:`~vcasgd.errors.Fenced` where a newer lease of the subtask exists, and
    :class:`WorkInterrupted`; the errors of the user's code pass through."""

    def __init__(self, desk: WorkerContext) -> None:
        self._desk = desk
        self._pushes = 0
        #: of the last interval; None before the first one
        self._seconds_per_sample: float | None = None
        self._seconds_per_step: deque[float] = deque(maxlen=SPEED_INTERVALS)

    def train(self, lease: Lease, learner: Learner) -> None:
        """From where each shard stands to the end; the last pushes may still be on their way."""
        desk, subtask, plan = self._desk, lease.number, learner.plan
        epoch, size = plan.epoch_of(subtask), plan.size(subtask)
        positions = desk.links.begin(subtask, epoch, size, lease.token)
        self._watch(lease, epoch, size, positions)
        desk.doing = f"training subtask {subtask}"
        reach = partial(self._reach, learner, subtask)
        if min(positions) < size:
            learner.start_subtask()
        while (step := next_step(positions, size, reach)) is not None:
            self._get_ready(lease, learner, step)
            stop = self._interval(lease, learner, epoch, step)
            for shard in step.shards:
                positions[shard] = stop

    def _reach(self, learner: Learner, subtask: int, position: int) -> int:
        """Up to which sample the next interval goes, as the worker is to be by now."""
        learner.share, learner.asynchrony = self._desk.share, self._desk.asynchrony
        return learner.interval_stop(subtask, position)

    def settle(self, *, patiently: bool = False) -> None:
        """Looks what became of the pushed updates, and which leases are done with; see
        :meth:`~vcasgd.worker.links.Links.settle`."""
        # waiting for the parameter server is no standstill of the user's code
        self._desk.note_progress()
        self._desk.links.settle(patiently=patiently)
        self._sort_leases()

    def _watch(self, lease: Lease, epoch: int, size: int, positions: list[int]) -> None:
        """Where others pushed all of it, the lease is kept until it is applied."""
        for shard, position in enumerate(positions):
            if position >= size:
                self._desk.links[shard].outbox.watch(lease.number, epoch, size)

    def _get_ready(self, lease: Lease, learner: Learner, step: Step) -> None:
        """Waits for room and makes the base new. Raises :class:`WorkInterrupted` where the lease is
        no longer to be worked on."""
        desk = self._desk
        waited = desk.links.wait_for_room(
            step.shards,
            lambda: not desk.may_go_on(lease),
            partial(self.settle, patiently=True),
        )
        desk.note_progress()
        # what was fetched before a wait is old
        desk.links.refresh(again=waited)
        self._sort_leases()
        self._check_still_mine(lease, learner, step)

    def _interval(self, lease: Lease, learner: Learner, epoch: int, step: Step) -> int:
        desk, started = self._desk, time.monotonic()
        if self._seconds_per_sample is not None:
            desk.links.prefetch(self._seconds_per_sample * (step.stop - step.start))
        desk.unpushed_since = time.time()
        base = Base(desk.links.base, desk.links.base_integers)
        trained = learner.train(
            base,
            lease.number,
            step.start,
            step.stop,
            should_stop=lambda: not desk.may_go_on(lease),
            on_step=desk.on_step,
        )
        samples, seconds = trained.stop - step.start, time.monotonic() - started
        self._seconds_per_sample = seconds / max(samples, 1)
        self._note_speed(seconds, trained.steps, learner)
        desk.failures = 0
        desk.samples += samples
        unchanged = torch.equal(trained.integers, base.integers)
        self._push(lease, learner, epoch, step, trained, integers_changed=not unchanged)
        desk.unpushed_since = None
        return trained.stop

    def _note_speed(self, seconds: float, steps: int, learner: Learner) -> None:
        desk = self._desk
        self._seconds_per_step.append(seconds / max(steps, 1))
        desk.step_seconds, desk.local_steps = median(self._seconds_per_step), steps
        desk.momentum = learner.momentum

    def _push(
        self,
        lease: Lease,
        learner: Learner,
        epoch: int,
        step: Step,
        trained: Trained,
        *,
        integers_changed: bool,
    ) -> None:
        """Each shard's part to its own store node."""
        self._pushes += 1
        last = learner.is_last(lease.number, trained.stop) or self._desk.leaving.is_set()
        for shard in step.shards:
            link = self._desk.links[shard]
            assert link.base is not None
            payload = learner.encoded(link.part, trained.update, last=last)
            header = Header(
                update=f"{self._desk.name}.{os.getpid()}.{self._pushes}",
                worker=self._desk.name,
                shard=shard,
                subtask=lease.number,
                start=step.start,
                stop=trained.stop,
                base=link.base[0],
                token=lease.token,
                codec=payload.codec,
                size=len(payload),
                layout=learner.layout_digest,
                integers=encode_integers(trained.integers)
                if integers_changed and shard == 0
                else "",
                loss_sum=trained.loss_sum,
            )
            link.outbox.submit(header, epoch, payload)

    def _check_still_mine(self, lease: Lease, learner: Learner, step: Step) -> None:
        desk = self._desk
        if lease.piece in desk.again:
            # a part of it was rejected or lost: find out anew where it stands
            raise WorkInterrupted
        if not desk.may_go_on(lease):
            if not desk.held.has(lease):
                desk.drop_current()
            elif any(learner.owes(desk.links[shard].part) for shard in step.shards):
                # one more step, to carry what encodings have kept back
                return
            raise WorkInterrupted

    def _sort_leases(self) -> None:
        desk = self._desk
        settled = desk.links.collect()
        for subtask, reason in settled.rejected:
            log.warning("an update of subtask %d was rejected: %s", subtask, reason)
        unsettled = desk.links.subtasks()
        for lease in desk.held.all():
            if lease.kind is not WorkKind.TRAIN:
                continue
            if lease.number in settled.rework:
                desk.again[lease.piece] = lease
            elif (
                lease != desk.current
                and lease.number not in unsettled
                and lease.piece not in desk.again
            ):
                desk.finish(lease)
