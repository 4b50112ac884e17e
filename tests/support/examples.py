"""Examples as jobs of real processes that lose their workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.harness import Harness
from support.waiting import await_truth
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.job import JobRecord, JobState

#: Seconds for a whole example on a busy machine.
EXAMPLE_SECONDS = 600


def finish_although_workers_die(
    harness: Harness, example: Path, *, samples: int, epochs: int, **fields: Any
) -> JobRecord:
    """Run an example's job of ``epochs`` with ``samples`` each on two workers until it succeeds.

    Each of them is killed while the job trains, the second one three epochs later, and replaced.
    Fails unless each sample counts exactly once in each epoch.
    """
    spec = JobSpec.load(example / "job.yaml").model_copy(update={"epochs": epochs, **fields})
    harness.start_server()
    harness.start_job_loop()
    job = harness.submit(example, **spec.model_dump(mode="json", exclude={"name", "working_dir"}))
    for nth, killed in enumerate(harness.start_workers(job, 2)):
        await_truth(lambda nth=nth: harness.applied(job) > samples * (1 + 3 * nth))
        harness.workers[killed].kill()
        harness.start_worker(job)
    await_truth(lambda: harness.jobs.get(job).state is JobState.SUCCEEDED, EXAMPLE_SECONDS)
    done = harness.jobs.get(job)
    assert (done.totals["samples"], done.totals["repeated"]) == (epochs * samples, 0)
    return done
