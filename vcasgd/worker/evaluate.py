"""Evaluates the model at a point of the job's progress."""

from __future__ import annotations

import time
from collections.abc import Callable

from vcasgd.errors import SnapshotMissing
from vcasgd.learning.vector import Floats
from vcasgd.store.ledger.leases import Lease
from vcasgd.store.tensors.sharded import ShardedSnapshots
from vcasgd.store.tensors.snapshot_index import ModelSnapshot, nodes_of, versions_of
from vcasgd.task.task import user_code
from vcasgd.worker import WorkerContext
from vcasgd.worker.departure import IDLE_SECONDS
from vcasgd.worker.learner import Learner
from vcasgd.worker.leases import WorkerStatus, WorkInterrupted


def evaluate(
    context: WorkerContext,
    status: WorkerStatus,
    lease: Lease,
    learner: Learner,
    may_continue: Callable[[], bool],
) -> str | None:
    """Evaluate the model on the validation split and report the metrics.

    Returns why the task wants the job to end; None if it goes on. Raises what
    :class:`~vcasgd.worker.trainer.Trainer` raises.
    """
    name, job = context.job, context.jobs.get(context.job)
    facts = job.facts
    assert facts is not None
    points = facts.points(learner.spec)
    unit = "epoch" if points.at_epochs else "sample"
    status.doing = f"evaluating {unit} {lease.number}"
    nodes = nodes_of(context.nodes, facts.store_nodes, facts.shards, name)
    snapshots = ShardedSnapshots(nodes, name, learner.cut(facts.shards))

    def pinned() -> tuple[ModelSnapshot, Floats]:
        # If the snapshot that was pinned at the point is lost, the present one replaces it.
        pin, mapped = points.pin(lease.number), learner.maps_vectors
        while may_continue():
            try:
                return snapshots.fetch_pinned(pin, mapped=mapped)
            except SnapshotMissing:
                snapshots.request_pin(pin)
                status.note_progress()
                time.sleep(IDLE_SECONDS)
        raise WorkInterrupted

    def after_step() -> bool:
        status.on_step()
        return not may_continue()

    whole, floats = pinned()
    started = time.monotonic()
    # A job has an average from its first update on.
    average = snapshots.fetch_states(whole, floats) if learner.spec.ema else None
    integers = whole[0].meta.integer_vector()
    metrics = learner.evaluate(floats, integers, average=average, after_step=after_step)
    if not metrics:
        raise WorkInterrupted
    samples = min(each.record.applied(points.plan).samples_applied for each in whole)
    result = {
        "version": whole[0].meta.version,
        "metrics": metrics,
        "worker": context.name,
        "seconds": time.monotonic() - started,
        "at": time.time(),
        "versions": versions_of(whole),
        "samples": samples,
        "rollbacks": min(shard.meta.rollbacks for shard in whole),
    }
    context.leases.report_evaluation(lease, result)
    earlier = [each.metrics for each in job.evaluations if (each.samples or 0) < samples]
    with user_code("end_after"):
        return learner.task.end_after([*earlier, metrics])
