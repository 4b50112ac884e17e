"""Deletion of jobs that have ended."""

from __future__ import annotations

import pytest
from support.lines import printed
from support.world import World, spec_of

from vcasgd.errors import Cause, Conflict, NotFound
from vcasgd.store.keys import DELETED, LedgerKeys
from vcasgd.store.ledger.job import Failure, JobState
from vcasgd.store.ledger.retention import LATE_SECONDS, Retention


def keys_of(world: World, job: str) -> set[str]:
    """Return what the ledger has of a job, under any key."""
    return {key.decode() for key in world.ledger.scan_iter(f"*{job}*")}


def ended(world: World) -> str:
    job = world.jobs.submit(spec_of(), "0" * 64).id
    world.jobs.cancel(job)
    return job


def test_deleted_job_leaves_nothing(world: World) -> None:
    job, retention = world.job, Retention(world.ledger)
    world.leases("a").renew({"at": 1.0}, [])
    world.jobs.add_metrics(job, {"at": 1.0})
    world.jobs.add_logs(job, "a", printed(["line"]))
    world.jobs.report_failure(job, Failure("a", "train:0", "boom", "", Cause.WORK))
    world.jobs.set_checkpoints(job, {"v1": {}})
    world.jobs.workers.drain([(job, "a")])
    world.jobs.workers.quarantine(job, "b", "why")
    world.jobs.workers.record_losses([(job, "i-1", "killed")])
    assert len(keys_of(world, job)) >= 11
    with pytest.raises(Conflict, match="has not ended"):
        retention.delete(job)
    assert world.jobs.get(job).state is JobState.RUNNING

    world.jobs.cancel(job)
    retention.delete(job)

    assert keys_of(world, job) == set()
    for call in (world.jobs.get, retention.delete):
        with pytest.raises(NotFound):
            call(job)
    assert world.jobs.newest(0) == world.jobs.active() == []


def test_late_writes_are_deleted_too(world: World) -> None:
    job, retention = ended(world), Retention(world.ledger)
    retention.delete(job)
    # A worker that still has access sends its last lines
    world.jobs.add_logs(job, "a", printed(["line"]))
    retention.delete_late_writes()
    assert keys_of(world, job) == {LedgerKeys(job).logs}

    world.ledger.zincrby(DELETED, -LATE_SECONDS - 1, job)
    retention.delete_late_writes()
    assert keys_of(world, job) == set()
    assert world.ledger.zcard(DELETED) == 0


def test_oldest_ended_jobs_are_deleted_and_no_others(world: World) -> None:
    oldest, *others = [ended(world) for _ in range(4)]
    retention = Retention(world.ledger)

    assert retention.keep(4) == []
    assert retention.keep(3, spared=[oldest]) == []
    assert retention.keep(2, spared=[oldest]) == others[:1]
    assert retention.keep(1) == [oldest, others[1]]
    assert retention.keep(1) == []
    assert world.jobs.newest(0) == [others[2], world.job]
    assert retention.keep(0) == [others[2]]
    assert world.jobs.active() == [world.job]
