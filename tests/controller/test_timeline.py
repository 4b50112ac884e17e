"""Timelines of machines that the controller writes to the ledger."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from support.controllers import Cloud, Controllers
from support.fleet_records import PACKAGE, job_spec
from support.harness import RedisServer

from vcasgd.controller.fleet.act import drain_seconds
from vcasgd.schemas.fleet import MachineState
from vcasgd.spec.job import JobState
from vcasgd.stack.cleanup import Unended, remove_machines
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.worker_names import worker_name


@pytest.fixture
def job(jobs: Jobs) -> str:
    workers = {"min": 1, "max": 1}
    return jobs.submit(job_spec(workers=workers, subtasks_per_epoch=100), PACKAGE).id


def spans(jobs: Jobs, job: str) -> list[dict[str, Any]]:
    """Return the spans of the only machine of a job."""
    (timeline,) = jobs.timelines(job).values()
    found: list[dict[str, Any]] = timeline["spans"]
    return found


def states(jobs: Jobs, job: str) -> list[str]:
    return [span["state"] for span in spans(jobs, job)]


def test_timeline_follows_a_machine_that_a_job_pays_for(
    controllers: Controllers, jobs: Jobs, job: str
) -> None:
    # Given a machine that boots
    cloud = Cloud()
    cloud.boots = False
    loop = controllers.start(cloud)
    controllers.run(loop, cloud.machines)
    assert states(jobs, job) == ["booting"]

    # When it joins, gets a notice, and is taken, and controllers change meanwhile
    cloud.join()
    controllers.run(loop, cloud.workers)
    loop = controllers.start(cloud)
    loop.round()
    (one,) = cloud.machines()
    cloud.boots = False
    cloud.change(one.id, state=MachineState.LEAVING)
    loop.round()
    cloud.take(one.id)
    loop.round()

    # Then its timeline has a span for each phase, without gaps
    timeline = jobs.timelines(job)[one.id]
    assert [span["state"] for span in timeline["spans"]] == ["booting", "running", "notice", "dead"]
    assert all(before["to"] == after["from"] for before, after in pairwise(timeline["spans"]))
    assert timeline["reason"] == "evicted"


def test_machine_of_a_draining_worker_drains_and_ends(
    controllers: Controllers, jobs: Jobs, job: str
) -> None:
    cloud = Cloud()
    loop, (one,) = controllers.run_with(cloud, 1)
    jobs.transition(job, JobState.PAUSED, [JobState.STARTING], why="test")
    loop.round()
    loop.round()
    assert states(jobs, job) == ["booting", "running", "draining"]

    controllers.ahead += drain_seconds(controllers.settings) + 1
    controllers.run(loop, lambda: not cloud.workers())
    controllers.ahead += controllers.settings.idle_seconds + 1
    controllers.run(loop, lambda: not cloud.machines())
    assert states(jobs, job)[-1] == "dead"
    assert jobs.timelines(job)[one.id]["reason"] == "idle"


def test_timelines_of_an_ended_job_end_with_it_and_are_not_written_again(
    controllers: Controllers, jobs: Jobs, job: str
) -> None:
    loop, (one,) = controllers.run_with(Cloud(), 1)
    jobs.update_timelines({}, {job: [one.id]})
    loop.round()
    assert jobs.timelines(job) == {}, "nothing has changed"

    jobs.cancel(job)
    loop.round()
    (span,) = spans(jobs, job)[-1:]
    assert (span["state"], span["to"] is None) == ("running", False)


def test_machines_of_a_stack_that_stops_are_not_lost_and_their_workers_are_gone(
    controllers: Controllers, jobs: Jobs, job: str, ledger_server: RedisServer
) -> None:
    # Given a worker that reports
    _, (one,) = controllers.run_with(Cloud(), 1)
    worker = worker_name(one.id, job)
    beat = json.dumps({"at": 1.0, "pushed_bytes": 7})
    controllers.ledger.hset(LedgerKeys(job).workers, worker, beat)

    # When the stack ends its machines
    remove_machines(ledger_server.url, controllers.settings, ["controller"], [])

    # Then none of its workers is counted any more, and its machine is released
    assert jobs.workers.count(job) == 0
    assert jobs.workers.heartbeats(job) == {}
    timeline = jobs.timelines(job)[one.id]
    assert (timeline["reason"], timeline["lost"]) == ("the stack was stopped", False)
    assert states(jobs, job)[-1] == "dead"
    loop = controllers.start(Cloud())
    loop.round()
    assert not jobs.timelines(job)[one.id]["lost"]


def test_pools_of_a_stack_that_stops_are_forgotten_unless_machines_may_run(
    controllers: Controllers, ledger: RedisClient, ledger_server: RedisServer
) -> None:
    control, settings = Control(ledger), controllers.settings
    control.set_pool_specs({"a": {"name": "a", "provider": "aws"}})

    remove_machines(ledger_server.url, settings, ["controller"], [Unended("pool a", (), "no")])
    assert control.pool_specs().keys() == {"a"}

    remove_machines(ledger_server.url, settings, ["controller"], [])
    assert control.pool_specs() == {}
