"""Trains leased subtasks, one push interval after the other: fetch, train, push.

Each shard has its own position in a subtask. Usually all positions are the same; if they aren't,
an interval is pushed only to the shards that lack it (:mod:`vcasgd.learning.shards`).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from vcasgd.errors import Fenced
from vcasgd.learning.shards import PushInterval, next_interval
from vcasgd.learning.vector import counted
from vcasgd.spec.sections import Tuning
from vcasgd.steady_time import steady_time
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.leases import Lease
from vcasgd.store.ledger.tuning import Tunings
from vcasgd.store.tensors.header import Logged
from vcasgd.worker.departure import Departure
from vcasgd.worker.exchange import Exchange
from vcasgd.worker.interval import Trained
from vcasgd.worker.learner import Learner
from vcasgd.worker.leases import LeaseBook, LeaseState, WorkerStatus, WorkInterrupted
from vcasgd.worker.member import Member, is_late
from vcasgd.worker.moments_exchange import MomentsExchange
from vcasgd.worker.own_copy import OwnCopy
from vcasgd.worker.update_queue import Settled
from vcasgd.worker.verification import WorkerVerification

log = logging.getLogger(__name__)

#: Number of push intervals over which a worker's speed is measured. Their median ignores an
#: interval that waited for its data or was suspended.
SPEED_INTERVALS = 5


class TunedSettings:
    """Settings that the controller tunes for this worker; the heartbeat refreshes them."""

    def __init__(self, ledger: RedisClient, job: str, worker: str) -> None:
        self._tunings = Tunings(ledger, job)
        self._worker = worker
        self._tuning = Tuning()
        #: Fraction of a push interval that this worker makes.
        self.share = 1.0
        #: Momentum that asynchrony adds.
        self.asynchrony = 0.0

    def follow(self, tuning: Tuning) -> None:
        """Read the settings that the job has tuned from now on."""
        self._tuning = tuning

    def refresh(self) -> None:
        """Read the present values. Raises :class:`~vcasgd.errors.StoreUnavailable`, and changes
        nothing then."""
        if not self._tuning.of_workers:
            return
        tuned = self._tunings.read()
        if self._tuning.local_steps:
            self.share = tuned.shares.get(self._worker, 1.0)
        if self._tuning.momentum:
            self.asynchrony = tuned.implicit_momentum


@dataclass(frozen=True)
class _Sums:
    """Sums over intervals, by the names in headers of updates."""

    loss_sum: float = 0.0
    skipped: int = 0
    weight: float | None = None
    logged: tuple[Logged, ...] = ()

    def plus(self, trained: Trained) -> _Sums:
        weight = None if trained.weight is None else (self.weight or 0.0) + trained.weight
        sums = {name: (total, count) for name, total, count in self.logged}
        for name, (total, count) in trained.logged.items():
            before, number = sums.get(name, (0.0, 0))
            sums[name] = before + total, number + count
        return _Sums(
            self.loss_sum + trained.loss_sum,
            self.skipped + trained.skipped,
            weight,
            tuple((name, *one) for name, one in sums.items()),
        )


@dataclass
class _Work:
    """The subtask in progress, with its epoch and its number of samples.

    ``positions`` are those of the shards, ``reached`` that of the worker's own copy, if it is ahead
    of some of them, and ``lacking`` what each shard lacks of its intervals.
    """

    lease: Lease
    learner: Learner
    epoch: int
    size: int
    positions: list[int]
    lacking: list[_Sums]
    reached: int | None = None

    def next_interval(self, share: float) -> PushInterval | None:
        """Return the next interval; None at the end of the subtask."""

        def reach(position: int) -> int:
            return self.learner.interval_stop(self.lease.number, position, share)

        if self.reached is None:
            return next_interval(self.positions, self.size, reach)
        stop = min(reach(self.reached), self.size)
        return PushInterval(self.reached, stop, tuple(range(len(self.positions))))

    def give_up_copy(self) -> None:
        """Continue from the positions of the shards."""
        self.reached, self.lacking = None, [_Sums()] * len(self.positions)


@dataclass
class Trainer:
    """Raises :class:`~vcasgd.errors.SnapshotMissing` while there is no model,
    :class:`~vcasgd.errors.StoreUnavailable` while a server is unavailable,
    :class:`~vcasgd.errors.Fenced` if the lease was lost, and
    :class:`~vcasgd.worker.leases.WorkInterrupted`; errors of the user's code pass through."""

    name: str
    exchange: Exchange
    book: LeaseBook
    departure: Departure
    status: WorkerStatus
    tuned: TunedSettings
    moments: MomentsExchange
    verification: WorkerVerification
    #: Distinguishes the updates of this process from those of one that had the worker's name: in a
    #: container that starts again, processes have the same ids.
    _mark: str = field(default_factory=partial(secrets.token_hex, 4), init=False)
    _pushes: int = field(default=0, init=False)
    #: Measured in the last interval; None before the first one.
    _seconds_per_sample: float | None = field(default=None, init=False)
    _seconds_per_step: deque[float] = field(
        default_factory=lambda: deque(maxlen=SPEED_INTERVALS), init=False
    )

    def train(self, lease: Lease, learner: Learner) -> None:
        """Train a subtask from each shard's position to its end.

        The last updates may still be unapplied when this returns.
        """
        subtask, plan = lease.number, learner.plan
        epoch, size = plan.epoch_of(subtask), plan.size(subtask)
        if self.exchange.unpushed:
            # Of a subtask that was interrupted.
            self.exchange.drop_copy()
        positions = self.exchange.begin(subtask, epoch, size, lease.token)
        work = _Work(lease, learner, epoch, size, positions, [_Sums()] * len(positions))
        self._watch_complete(work, positions)
        if len(positions) > 1:
            # An interval can be verified only if one server gets all of its update.
            self.verification = WorkerVerification()
        self.status.doing = f"training subtask {subtask}"
        if min(positions) < work.size:
            learner.start_subtask()
        while (interval := work.next_interval(self.tuned.share)) is not None:
            self._prepare_interval(work, interval)
            if self.exchange.copy is None:
                work.give_up_copy()
            if learner.member is not None:
                self._prepare_member(work, learner.member)
            # The local batch may have changed.
            self._train_interval(work, work.next_interval(self.tuned.share) or interval)
            if learner.member is not None:
                self.moments.share(learner.member, self.exchange.rollbacks)

    def _prepare_member(self, work: _Work, member: Member) -> None:
        """Adapt to the last round."""
        member.shards = len(work.positions)
        if self.exchange.copy is None:
            member.measure_exchange(self.exchange.settled, time.monotonic())
        member.follow(self.exchange.base)
        self.moments.open(self.exchange.store_nodes)
        if self.verification.overlaps:
            self.exchange.limit_unapplied(work.learner.max_unapplied)
        if self.verification.adopts:
            self.moments.adopt(member, self.exchange.rollbacks)

    def settle(self) -> None:
        """Find out what became of the pushed updates, and drop the leases that are done; see
        `Exchange.settle`."""
        # Waiting for the parameter server is no standstill of the user's code.
        self.status.note_progress()
        self._apply(self.exchange.settle())

    def may_continue(self, lease: Lease) -> bool:
        """Return True while the lease is held and the worker doesn't have to leave."""
        return self.book.state(lease) is not None and not self.departure.leave_if_due()

    def _watch_complete(self, work: _Work, positions: list[int]) -> None:
        """Keep the lease until the shards that have the whole subtask have applied it."""
        for shard, position in enumerate(positions):
            if position >= work.size:
                self.exchange[shard].updates.watch(work.lease.number, work.epoch, work.size)

    def _apply(self, settled: Settled) -> None:
        for subtask, reason in settled.rejected:
            log.warning("an update of subtask %d was rejected: %s", subtask, reason)
            self.verification.rejected(reason)
        self.book.settle(settled.rework, self.exchange.subtasks())

    # -- before an interval ------------------------------------------------------------------------

    def _prepare_interval(self, work: _Work, interval: PushInterval) -> None:
        """Wait for room and refresh the base.

        Raises :class:`WorkInterrupted` and :class:`Fenced` if the lease must not be worked on.
        """
        waited = self._wait_for_room(work.lease, interval)
        self.status.note_progress()
        if not self.exchange.unpushed:
            # It may need the model for something else.
            waited = self.verification.serve(work.learner) or waited
        # Without an interval, a fetch would take memory for nothing.
        self._check_lease(work.lease, interval)
        if not self._continue_copy(work, interval):
            # What was fetched before a wait is too old.
            self._apply(self.exchange.refresh(again=waited))
        self._check_lease(work.lease, interval)

    def _continue_copy(self, work: _Work, interval: PushInterval) -> bool:
        """Return True if the interval continues from this worker's own copy."""
        if self.exchange.copy is None:
            return False
        # What it has more is pushed first.
        if not self._keeps_copy(work, interval) and not self.exchange.unpushed:
            return False
        self._apply(self.exchange.settle_beside())
        return self.exchange.copy is not None and not self.exchange.went_back

    def _keeps_copy(self, work: _Work, interval: PushInterval) -> bool:
        member, is_whole = work.learner.member, len(interval.shards) == len(work.positions)
        return member is not None and member.keeps_copy and self.verification.overlaps and is_whole

    def _wait_for_room(self, lease: Lease, interval: PushInterval) -> bool:
        """Wait until no shard of the interval is full; return True if any was."""
        waited = False
        for settled in self.exchange.wait_for_room(interval.shards):
            waited = True
            self.status.note_progress()
            self._apply(settled)
            if not self.may_continue(lease):
                break
        return waited

    def _check_lease(self, lease: Lease, interval: PushInterval) -> None:
        match self.book.state(lease):
            case LeaseState.POSTPONED:
                # A part was rejected or lost, so the positions have to be read again.
                raise WorkInterrupted
            case None:
                raise Fenced(f"the lease of subtask {lease.number} was lost")
        # With a residual, one more local step, to push what encodings have kept back.
        lacking = self.exchange.unpushed or self.exchange.has_residual(interval.shards)
        if self.departure.leave_if_due() and not lacking:
            raise WorkInterrupted

    # -- an interval -------------------------------------------------------------------------------

    def _train_interval(self, work: _Work, interval: PushInterval) -> None:
        status, member, started = self.status, work.learner.member, time.monotonic()
        exchange = self.exchange
        status.unpushed_since = steady_time()
        keeps_copy = exchange.copy is not None or self._keeps_copy(work, interval)
        base = exchange.start_interval(keep_copy=keeps_copy, loaded=work.learner.is_loaded)
        if self._seconds_per_sample is not None and exchange.copy is None:
            exchange.prefetch(self._seconds_per_sample * (interval.stop - interval.start))
        steps_before = status.steps

        def after_step() -> bool:
            status.on_step()
            self._follow(work.learner)
            if not self.may_continue(work.lease) or exchange.went_back:
                return True
            if member is None:
                return False
            if member.takes_turns and self._next_turn(member, exchange.copy):
                return True
            planned = (interval.stop - interval.start) / member.batch
            done, seconds = status.steps - steps_before, time.monotonic() - started
            return is_late(base.round, planned, done, seconds)

        self.verification.begin(work.learner, base)
        trained = work.learner.train(
            base,
            work.lease.number,
            interval.start,
            interval.stop,
            after_step=after_step,
            asynchrony=self.tuned.asynchrony,
            memory=exchange.lend,
            reads=not keeps_copy,
        )
        ended = time.monotonic()
        seconds = ended - started
        self._measure(work, trained.stop - interval.start, trained, seconds)
        if member is not None:
            member.measure(seconds / max(trained.steps, 1))
            status.uncorrected = member.uncorrected or status.uncorrected
        if exchange.copy is not None:
            self._push_copy(work, interval, trained, exchange.copy)
        else:
            self._push(work, interval, trained, base.integers)
            if member is not None:
                member.end(self.exchange[0].updates.added, ended)
        status.unpushed_since = None

    def _follow(self, learner: Learner) -> None:
        """Move the worker's own copy, if it keeps one, to what was found beside the training."""
        copy, member = self.exchange.copy, learner.member
        if copy is None:
            return
        self._shift(learner, copy)
        copy.follow()
        seconds = copy.take_exchange_seconds()
        if seconds is not None and member is not None:
            member.measure_copy(seconds)

    def _shift(self, learner: Learner, copy: OwnCopy, *, wait: Collection[int] = ()) -> None:
        """Move the worker's own copy by what has been computed.

        ``wait``: shards for whose part it waits if that is being computed.
        """
        started = time.monotonic()
        if shifts := copy.take_shifts(wait=wait):
            learner.shift((part, shift.memory) for part, shift in shifts)
            for _, shift in shifts:
                shift.release()
        _record_stall(learner, started)

    def _next_turn(self, member: Member, copy: OwnCopy | None) -> Collection[int]:
        """Return the shards of the worker's copy to push now if it pushes them in turn."""
        if copy is None or not member.may_start_turn(time.monotonic()):
            return ()
        return copy.next_turn(member.shards_of_turn)

    def _measure(self, work: _Work, samples: int, trained: Trained, seconds: float) -> None:
        status = self.status
        self._seconds_per_sample = seconds / max(samples, 1)
        self._seconds_per_step.append(seconds / max(trained.steps, 1))
        status.samples += samples
        status.step_seconds = median(self._seconds_per_step)
        status.local_steps = trained.steps
        status.momentum = trained.momentum
        if trained.skipped:
            status.bad_samples = work.learner.bad_samples

    def _push(self, work: _Work, interval: PushInterval, trained: Trained, before: Tensor) -> None:
        """Hand an update over to the exchange; ``before`` are the counters of its base."""
        member = work.learner.member
        fields = {
            **self._fields(work, interval, trained),
            "start": interval.start,
            **asdict(_Sums().plus(trained)),
        }
        self.exchange.push(
            *(fields, work.epoch, trained.update, interval.shards),
            counters=counted(work.learner.layout, before, trained.integers),
            last=self._is_last(work, trained),
            keep=member is not None and member.overlaps,
        )
        for shard in interval.shards:
            work.positions[shard] = trained.stop

    def _push_copy(
        self, work: _Work, interval: PushInterval, trained: Trained, copy: OwnCopy
    ) -> None:
        """Push the parts of the worker's own copy whose turn it is, at the end of an interval."""
        member = work.learner.member
        work.lacking = [sums.plus(trained) for sums in work.lacking]
        work.reached = trained.stop
        shards: Collection[int] = range(len(work.positions))
        self._follow(work.learner)
        if copy.went_back:
            shards = ()
        elif member is not None and member.takes_turns and not self._ends(work):
            shards = self._next_turn(member, copy)
        if shards and member is not None:
            member.start_turn(time.monotonic())
        # Nothing looks for newer versions until the push, so the copy doesn't move any more.
        self._shift(work.learner, copy, wait=shards)
        fields = self._fields(work, interval, trained) if shards else {}
        starts = zip(work.positions, work.lacking, strict=True)
        own = [{"start": start, **asdict(sums)} for start, sums in starts]
        started = time.monotonic()
        copy.push(
            {shard: {**fields, **own[shard]} for shard in shards},
            work.epoch,
            work.learner.read_part,
            trained.integers,
            last=self._is_last(work, trained),
        )
        _record_stall(work.learner, started)
        for shard in shards:
            work.positions[shard], work.lacking[shard] = trained.stop, _Sums()
        if copy.is_even and not copy.went_back:
            work.reached = None

    def _ends(self, work: _Work) -> bool:
        return work.reached == work.size or not self.may_continue(work.lease)

    def _is_last(self, work: _Work, trained: Trained) -> bool:
        ends = work.learner.is_last(work.lease.number, trained.stop)
        return ends or self.departure.leave_if_due()

    def _fields(self, work: _Work, interval: PushInterval, trained: Trained) -> dict[str, Any]:
        """Return what the headers of an update have in common for all shards."""
        self._pushes += 1
        member = work.learner.member
        name = f"{self.name}.{self._mark}.{self._pushes}"
        return {
            "update": name,
            "worker": self.name,
            "subtask": work.lease.number,
            "stop": trained.stop,
            "token": work.lease.token,
            "layout": work.learner.findings.layout_digest,
            "batch": member.batch if member else 0.0,
            "step_seconds": member.step_seconds if member else 0.0,
            "exchange_seconds": member.exchange_seconds if member else 0.0,
            "claims": self.verification.end(work.learner, name, interval.stop),
        }


def _record_stall(learner: Learner, started: float) -> None:
    """Record that the training stood still since then, by :func:`time.monotonic`.

    A GPU copies vectors in next to no time; what passes there is the rest of a step.
    """
    if learner.member is not None and torch.device(learner.device).type == "cpu":
        learner.member.stall(time.monotonic() - started)
