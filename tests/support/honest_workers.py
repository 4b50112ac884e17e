"""Honest workers in a :class:`~support.world.World`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from support.exact import counts_after
from support.world import RESULT, World
from vcasgd.errors import Fenced, SnapshotMissing
from vcasgd.store.ledger.leases import Lease, Wait
from vcasgd.store.ledger.leases import WorkKind as Work
from vcasgd.store.tensors.header import Header


@dataclass(frozen=True)
class Sent:
    header: Header
    payload: memoryview


class HonestWorker:
    """An honest worker, which keeps each update until it is applied, and resends it."""

    def __init__(self, world: World, name: str, *, interval: int = 2, most: int = 2) -> None:
        self.world = world
        self.name = name
        self.interval = interval
        self.most = most
        self.leases = world.leases(name)
        self.lease: Lease | None = None
        self.position: int | None = None
        self.unapplied: list[Sent] = []
        self.settled: list[str] = []

    def step(self) -> None:
        """Check the status of the updates, and then do a little work."""
        # Without a snapshot, the parameter server or a worker is about to restore it.
        with suppress(SnapshotMissing):
            self.settle()
        with suppress(SnapshotMissing):
            while len(self.unapplied) < self.most and self.work():
                pass

    @property
    def idle(self) -> bool:
        return self.lease is None and not self.unapplied

    def settle(self) -> None:
        world = self.world
        asked = [
            (each.header.subtask, world.plan.epoch_of(each.header.subtask), each.header.stop,
             each.header.update)
            for each in self.unapplied
        ]  # fmt: skip
        fates = world.sender.status(asked).outcomes
        unsettled, self.unapplied = self.unapplied, []
        for sent, fate in zip(unsettled, fates, strict=True):
            if fate == "pending" or (fate == "lost" and self._send(sent)):
                self.unapplied.append(sent)
            elif fate != "applied":
                self._begin_again(sent.header.subtask)
            self.settled.append(fate)

    def work(self) -> bool:
        """Do one push interval, one evaluation, or nothing."""
        if self.lease is None and not self._acquire():
            return False
        if self.lease is None or not self._has_begun(self.lease):
            return True
        assert self.position is not None
        stop = min(self.position + self.interval, self.world.plan.size(self.lease.number))
        # It trains from the newest snapshot.
        header, payload = self.world.update(
            self.lease.number,
            self.position,
            stop,
            self.lease.token,
            worker=self.name,
            rollbacks=self.world.snapshots.read().meta.rollbacks,
        )
        if self._send(Sent(header, payload)):
            self.unapplied.append(Sent(header, payload))
            self._reach(self.lease, stop)
        else:
            self._begin_again(self.lease.number)
        return True

    def _acquire(self) -> bool:
        answer = self.leases.acquire(idle=not self.unapplied)
        if isinstance(answer, Wait):
            return False
        if answer.kind is Work.TRAIN:
            self.lease, self.position = answer, None
        elif answer.kind is Work.EVALUATE:
            self.leases.report_evaluation(answer, RESULT)
        else:
            self.world.install()
            self.leases.report_facts(answer, self.world.facts().to_dict())
        return True

    def _begin_again(self, subtask: int) -> None:
        if self.lease is not None and self.lease.number == subtask:
            self.position = None

    def _has_begun(self, lease: Lease) -> bool:
        """Return True if there is work; query the subtask's position if it is not known."""
        if self.position is None:
            size, epoch = self.world.plan.size(lease.number), self.world.plan.epoch_of(lease.number)
            try:
                self._reach(lease, self.world.sender.begin(lease.number, epoch, size, lease.token))
            except Fenced:
                self.lease = None
        return self.lease is not None

    def _reach(self, lease: Lease, position: int) -> None:
        self.position = position
        if position >= self.world.plan.size(lease.number):
            self.lease = None

    def _send(self, sent: Sent) -> bool:
        epoch = self.world.plan.epoch_of(sent.header.subtask)
        try:
            return self.world.sender.push(sent.header, epoch, sent.payload).accepted
        except Fenced:
            return False


def run_to_end(
    world: World, workers: list[HonestWorker], turn: Callable[[], object], rounds: int = 200
) -> None:
    """Run workers until all samples of all epochs are applied, and check the result."""
    for _ in range(rounds):
        for worker in workers:
            worker.step()
        turn()
        if world.complete and world.jobs.get(world.job).finished_epochs == world.plan.epochs:
            break
        if all(worker.idle for worker in workers):
            world.expire()  # leases of fenced and dead workers
    assert world.counts() == counts_after(world.plan, world.plan.epochs)
    world.partition().assert_whole()
