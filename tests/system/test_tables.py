"""Jobs under ``codec: rows`` on real workers and three store nodes."""

from __future__ import annotations

import pytest
from support.harness import Harness
from support.training import TASKS
from support.waiting import await_truth

SAMPLES, EPOCHS, STEPS, BATCH = 400, 2, 2, 5


@pytest.mark.ci
def test_only_touched_rows_are_sent_and_each_counts_once_despite_a_kill(sharded: Harness) -> None:
    # Given a job that counts in a table over three store nodes, and two workers
    job = sharded.submit_audit(
        samples=SAMPLES,
        epochs=EPOCHS,
        subtasks=4,
        push_every=STEPS,
        step_seconds=0.01,
        working_dir=TASKS,
        task="tabled:Tabled",
        update={"rule": "async-local-sgd", "eta": 1.0, "codec": "rows"},
    )
    sharded.start_servers()
    victim, survivor = sharded.start_workers(job, 2)
    sharded.start_job_when_ready(job)
    await_truth(lambda: sharded.applied(job) >= 100)

    # When one of them is killed
    sharded.workers[victim].kill()
    await_truth(lambda: sharded.jobs.get(job).finished_epochs == EPOCHS)

    # Then every sample is in the model once for each epoch
    assert sharded.vector(job).tolist() == [EPOCHS] * SAMPLES * len(sharded.nodes)
    totals = sharded.jobs.get(job).totals
    assert (totals["repeated"], totals["rejected"]) == (0, {})

    # and a push contains only the rows of its samples: their count, numbers, and values
    beat = sharded.jobs.workers.heartbeats(job)[survivor]
    rows = STEPS * BATCH
    assert beat.pushes
    assert (beat.fetched_bytes or 0) >= 4 * len(sharded.vector(job))
    assert 0 < (beat.pushed_bytes or 0) <= beat.pushes * len(sharded.nodes) * 4 * (1 + 2 * rows)
