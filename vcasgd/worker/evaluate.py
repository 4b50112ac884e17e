"""Evaluates the model at a point of the job's progress."""

from __future__ import annotations

import time
from collections.abc import Callable

from vcasgd.errors import SnapshotMissing
from vcasgd.learning.vector import Floats
from vcasgd.store.ledger.leases import Lease
from vcasgd.store.tensors.sharded import ShardedSnapshots
from vcasgd.store.tensors.snapshot_index import ModelSnapshot, nodes_of, versions_of
from vcasgd.worker import WorkerContext
from vcasgd.worker.departure import IDLE_SECONDS
from vcasgd.worker.learner import Learner
from vcasgd.worker.leases import WorkerStatus, WorkInterrupted


class Evaluator:
    """Raises what :class:`~vcasgd.worker.trainer.Trainer` raises."""

    def __init__(self, context: WorkerContext, status: WorkerStatus) -> None:
        self._context = context
        self._status = status

    def evaluate(
        self, lease: Lease, learner: Learner, may_continue: Callable[[], bool]
    ) -> str | None:
        """Evaluate the model on the validation split and report the metrics.

        Returns why the task wants the job to end; None if it goes on.
        """
        job = self._context.jobs.get(self._context.job)
        facts = job.facts
        assert facts is not None
        points = facts.points(learner.spec)
        unit = "epoch" if points.at_epochs else "sample"
        self._status.doing = f"evaluating {unit} {lease.number}"
        name = self._context.job
        nodes = nodes_of(self._context.nodes, facts.store_nodes, facts.shards, name)
        snapshots = ShardedSnapshots(nodes, name, learner.cut(facts.shards))
        pin, mapped = points.pin(lease.number), learner.maps_vectors
        whole, floats = self._pinned(snapshots, pin, may_continue, mapped=mapped)
        started = time.monotonic()

        def after_step() -> bool:
            self._status.on_step()
            return not may_continue()

        # A job has an average from its first update on.
        average = snapshots.fetch_states(whole, floats) if learner.spec.ema else None
        metrics = learner.evaluate(
            floats,
            whole[0].meta.integer_vector(),
            average=average,
            after_step=after_step,
        )
        if not metrics:
            raise WorkInterrupted
        samples = min(each.record.applied(points.plan).samples_applied for each in whole)
        result = {
            "version": whole[0].meta.version,
            "metrics": metrics,
            "worker": self._context.name,
            "seconds": time.monotonic() - started,
            "at": time.time(),
            "versions": versions_of(whole),
            "samples": samples,
            "rollbacks": min(shard.meta.rollbacks for shard in whole),
        }
        self._context.leases.report_evaluation(lease, result)
        earlier = [each.metrics for each in job.evaluations if (each.samples or 0) < samples]
        return learner.end_after([*earlier, metrics])

    def _pinned(
        self,
        snapshots: ShardedSnapshots,
        name: str,
        may_continue: Callable[[], bool],
        *,
        mapped: bool,
    ) -> tuple[ModelSnapshot, Floats]:
        """Return the snapshots that were pinned at the point, and their vector.

        If one was lost, the present snapshot replaces it.
        """
        while may_continue():
            try:
                return snapshots.fetch_pinned(name, mapped=mapped)
            except SnapshotMissing:
                snapshots.request_pin(name)
                self._status.note_progress()
                time.sleep(IDLE_SECONDS)
        raise WorkInterrupted
