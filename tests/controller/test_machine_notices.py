"""Notices that only the machine itself receives, whether or not a worker runs on it."""

from __future__ import annotations

from support.fleet_records import PACKAGE, job_spec
from support.provider_backends import AwsBackend
from support.two_clouds import TwoClouds

from vcasgd.fleet.notices import Notice, NoticeKind
from vcasgd.store.ledger.jobs import Jobs

AT = 4_000_000_000.0


def test_a_machine_that_publishes_a_notice_is_replaced_at_once(
    clouds: TwoClouds, jobs: Jobs, aws: AwsBackend
) -> None:
    # Given a job on one machine, whose worker sends no heartbeat
    workers = {"min": 1, "max": 1, "pools": [aws.pool]}
    jobs.submit(job_spec(workers=workers, subtasks_per_epoch=1000), PACKAGE)
    loop = clouds.controller()
    clouds.run(loop, lambda: len(clouds.joined()) == 1)
    (machine,) = clouds.joined()

    # When the machine publishes a notice
    clouds.notices[machine] = Notice(NoticeKind.TERMINATE, AT)
    clouds.run(loop, lambda: len(aws.alive()) == 2)

    # Then another one is bought although the cloud lists the first as running
    row = clouds.control.machines()[machine]
    assert (row["state"], row["notice_at"]) == ("leaving", AT)
