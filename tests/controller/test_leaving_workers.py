"""Workers that have to leave: events of a preemption, and the end of those that don't leave."""

from __future__ import annotations

from support.controllers import Cloud, Controllers
from support.fleet_records import PACKAGE, events_of, job_spec

from vcasgd.controller.fleet.act import drain_seconds
from vcasgd.fleet.observed import Limits
from vcasgd.spec.job import JobState
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.workers import WorkerBeats
from vcasgd.worker_names import machine_of


def submit(jobs: Jobs, least: int, **fields: object) -> str:
    workers = {"min": least, "max": 2}
    return jobs.submit(job_spec(workers=workers, subtasks_per_epoch=100, **fields), PACKAGE).id


def test_both_jobs_have_one_event_of_a_preemption(
    controllers: Controllers, jobs: Jobs, ledger: RedisClient
) -> None:
    # Given a job on all machines, and one of a higher priority
    cloud = Cloud(2)
    donor = submit(jobs, 1, priority="low")
    loop, _ = controllers.run_with(cloud, 2)
    workers = cloud.workers()
    ledger.hset(LedgerKeys(donor).workers, mapping=dict.fromkeys(workers, '{"pushed_bytes": 5}'))
    other = submit(jobs, 0)
    loop.round()

    # When that has waited
    controllers.ahead += Limits().claim_seconds
    for _ in range(3):
        loop.round()

    # Then one worker is asked to leave, and both jobs say why
    (name,) = jobs.workers.draining(donor)
    machine = machine_of(name)
    (given,), (received,) = (
        events_of(jobs, donor, "machine-given"),
        events_of(jobs, other, "machine-received"),
    )
    assert given["text"] == f"{machine} goes to {other}, which has a higher priority"
    assert (
        received["text"] == f"{machine} comes from {donor}, because the job has a higher priority"
    )

    # And its machine works for the other job once it has left
    controllers.ahead += drain_seconds(controllers.settings) + 1
    controllers.run(loop, lambda: f"{other}.{machine}" in cloud.workers())

    # And the donor counts it no more, but still what it sent
    assert jobs.workers.names(donor) == workers - {name}
    assert WorkerBeats(ledger).traffic(donor).pushed_bytes == 10


def test_worker_that_an_earlier_controller_stopped_is_killed_in_time(
    controllers: Controllers, jobs: Jobs
) -> None:
    cloud = Cloud()
    job = submit(jobs, 1)
    loop, _ = controllers.run_with(cloud, 2)
    jobs.transition(job, JobState.PAUSED, [JobState.STARTING], why="test")
    loop.round()
    workers = cloud.workers()
    assert jobs.workers.draining(job) == set(workers)

    # When the next controller has waited for them as long as they may take
    loop = controllers.start(cloud)
    loop.round()
    controllers.ahead += drain_seconds(controllers.settings) - 10
    loop.round()
    assert cloud.workers() == workers
    controllers.ahead += 20
    loop.round()

    assert not cloud.workers()


def test_a_job_that_is_resumed_soon_keeps_its_workers(controllers: Controllers, jobs: Jobs) -> None:
    # Given a job whose workers left because it was paused
    cloud = Cloud()
    job = submit(jobs, 1)
    loop, _ = controllers.run_with(cloud, 2)
    jobs.transition(job, JobState.PAUSED, [JobState.STARTING], why="test")
    loop.round()
    workers = sorted(cloud.workers())
    cloud.crashed.update(workers)

    # When it is resumed in the time that they had to leave
    jobs.transition(job, JobState.STARTING, [JobState.PAUSED], why="test")
    loop.round()
    cloud.crashed.clear()
    controllers.run(loop, lambda: sorted(cloud.workers()) == workers)

    # Then its new workers, which have the same names, aren't killed after that time
    controllers.ahead += drain_seconds(controllers.settings) + 1
    for _ in range(2):
        loop.round()
        assert sorted(cloud.workers()) == workers
