"""Evaluates the model at the end of an epoch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

from torch import Tensor

from vcasgd.errors import SnapshotMissing
from vcasgd.store.ledger.job import Evaluation
from vcasgd.store.ledger.leases import Lease
from vcasgd.store.tensors.sharded import ModelSnapshot, ShardedSnapshots, versions_of
from vcasgd.store.tensors.snapshot import epoch_pin
from vcasgd.worker.context import WorkerContext
from vcasgd.worker.departure import IDLE_SECONDS
from vcasgd.worker.heartbeat import WorkerStatus
from vcasgd.worker.held_leases import WorkInterrupted
from vcasgd.worker.learner import Learner


class Evaluator:
    """Raises what :class:`~vcasgd.worker.trainer.Trainer` raises."""

    def __init__(self, context: WorkerContext, status: WorkerStatus) -> None:
        self._context = context
        self._status = status

    def evaluate(self, lease: Lease, learner: Learner, may_continue: Callable[[], bool]) -> None:
        """Evaluate the model on the validation split and report the metrics."""
        self._status.doing = f"evaluating epoch {lease.number}"
        whole, floats = self._pinned(lease, learner, may_continue)
        started = time.monotonic()
        metrics = learner.evaluate(
            floats,
            whole[0].meta.integer_vector(),
            should_stop=lambda: not may_continue(),
            on_step=self._status.on_step,
        )
        if not metrics:
            raise WorkInterrupted
        self._report(
            lease,
            Evaluation(
                epoch=lease.number,
                version=whole[0].meta.version,
                metrics=metrics,
                worker=self._context.name,
                seconds=time.monotonic() - started,
                at=time.time(),
                versions=versions_of(whole),
            ),
        )

    def _pinned(
        self, lease: Lease, learner: Learner, may_continue: Callable[[], bool]
    ) -> tuple[ModelSnapshot, Tensor]:
        """Return the snapshots that were pinned at the end of the epoch, and their vector.

        If one was lost, the present snapshot replaces it.
        """
        context, name = self._context, epoch_pin(lease.number)
        facts = context.jobs.get(context.job).facts
        assert facts is not None
        snapshots = ShardedSnapshots(context.nodes, context.job, learner.cut(facts.shards))
        while may_continue():
            try:
                return snapshots.fetch_pinned(name)
            except SnapshotMissing:
                snapshots.request_pin(name)
                self._status.note_progress()
                time.sleep(IDLE_SECONDS)
        raise WorkInterrupted

    def _report(self, lease: Lease, result: Evaluation) -> None:
        context = self._context
        fields = {key: value for key, value in asdict(result).items() if key != "epoch"}
        if not context.leases.report_evaluation(lease, fields):
            return
        metrics = ", ".join(
            f"{name} {value:.4f}" for name, value in result.metrics.items() if name != "count"
        )
        context.jobs.event(
            context.job,
            "evaluated",
            f"epoch {result.epoch}: {metrics}",
            epoch=result.epoch,
            version=result.version,
            metrics=result.metrics,
        )
