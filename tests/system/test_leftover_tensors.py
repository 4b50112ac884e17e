"""Data on the tensors servers of jobs that ended while no controller ran."""

from __future__ import annotations

import pytest
from support.harness import Harness
from support.training import Training
from support.waiting import await_truth

from vcasgd.store.ledger.retention import Retention
from vcasgd.store.tensors.snapshot_index import delete_job, scan_jobs


def stored(harness: Harness) -> set[str]:
    return {job for node in harness.nodes for job in scan_jobs(node.connection, 0)[1]}


@pytest.mark.parametrize("sharded", [0.25], indirect=True)
@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.ci
def test_a_job_that_ends_between_two_controllers_leaves_nothing(
    sharded: Harness, deleted: bool
) -> None:
    # Given two jobs, and data of one that this ledger doesn't know
    harness = sharded
    jobs = [Training(harness, samples=2000) for _ in range(2)]
    harness.start_servers()
    controller = harness.start_job_loop()
    for training in jobs:
        training.add_workers(1)
        training.await_more_samples(training.interval)
    harness.tensors.connection.set("vcasgd:{another-abc234:0}:meta", "x")
    ended, other = jobs

    # When one of them is canceled, while neither controller nor parameter servers run
    for process in (controller, *harness.servers.values()):
        process.kill()
    harness.jobs.cancel(ended.job)
    if deleted:
        Retention(harness.ledger.connection).delete(ended.job)
    assert ended.job in stored(harness)
    harness.start_servers()
    harness.start_job_loop()

    await_truth(lambda: ended.job not in stored(harness))
    assert stored(harness) == {other.job, "another-abc234"}
    other.await_more_samples(other.interval)
    harness.jobs.cancel(other.job)
    delete_job([node.connection for node in harness.nodes], "another-abc234")
    await_truth(lambda: not stored(harness))
