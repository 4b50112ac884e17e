"""Names that workers report under, and blame: they concern their own job only."""

from __future__ import annotations

import json

import pytest
from support.controllers import Cloud, Controllers
from support.fleet_records import PACKAGE, job_spec

from vcasgd.controller.fleet.loop import FleetLoop
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.worker_names import job_of, machine_of, worker_name


class TwoJobs:
    """Two jobs with a machine each, one of which has a hostile worker."""

    def __init__(self, controllers: Controllers, jobs: Jobs) -> None:
        spec = job_spec(workers={"min": 1, "max": 1}, subtasks_per_epoch=100)
        self.hostile, self.other = (jobs.submit(spec, PACKAGE).id for _ in range(2))
        self.cloud = Cloud()
        self.loop: FleetLoop
        self.loop, _ = controllers.run_with(self.cloud, 2)
        #: The machine of each job.
        self.machines = {job_of(name): machine_of(name) for name in self.cloud.workers()}

    def listed(self) -> set[str]:
        return {one.id for one in self.cloud.machines()}


@pytest.fixture
def two(controllers: Controllers, jobs: Jobs) -> TwoJobs:
    return TwoJobs(controllers, jobs)


def test_a_worker_that_blames_another_jobs_machine_does_not_end_it(
    controllers: Controllers, jobs: Jobs, two: TwoJobs
) -> None:
    # When a worker reports under a name on the other job's machine, and blames that
    blamed = worker_name(two.machines[two.other], two.hostile)
    jobs.workers.quarantine(two.hostile, blamed, "it says so")
    for _ in range(3):
        two.loop.round()
    assert two.listed() == set(two.machines.values())

    # Then only a machine of its own job would end
    blamed = worker_name(own := two.machines[two.hostile], two.hostile)
    jobs.workers.quarantine(two.hostile, blamed, "it says so")
    controllers.run(two.loop, lambda: own not in two.listed())
    assert two.machines[two.other] in two.listed()


def test_a_worker_that_reports_gpus_of_another_jobs_machine_starts_nothing_there(
    controllers: Controllers, two: TwoJobs
) -> None:
    name = worker_name(two.machines[two.other], two.other)
    beat = json.dumps({"at": 1.0, "gpus": 8, "ranks": 1})
    controllers.ledger.hset(LedgerKeys(two.hostile).workers, name, beat)
    for _ in range(3):
        two.loop.round()

    assert len(two.cloud.workers()) == 2
