"""Notices that only the machine itself receives, whether or not a worker runs on it."""

from __future__ import annotations

from support.fleet_records import PACKAGE, job_spec
from support.provider_backends import AwsBackend
from support.two_clouds import TwoClouds

from vcasgd.fleet.notices import Notice, NoticeKind
from vcasgd.store.ledger.jobs import Jobs

AT = 4_000_000_000.0


def test_a_spare_machine_with_a_notice_is_replaced_at_once(
    clouds: TwoClouds, jobs: Jobs, aws: AwsBackend
) -> None:
    # Given a job with a machine that trains and a spare one
    workers = {"min": 1, "max": 1, "spare": 1, "pools": [aws.pool]}
    job = jobs.submit(job_spec(workers=workers, subtasks_per_epoch=1000), PACKAGE).id
    loop = clouds.controller()

    def idle() -> list[str]:
        rows = clouds.control.machines()
        busy = any(row["job"] == job for row in rows.values())
        return [name for name, row in rows.items() if busy and row["joined"] and not row["job"]]

    clouds.run(loop, lambda: len(idle()) == 1 and len(aws.alive()) == 2)
    (spare,) = idle()

    # When the spare one publishes a notice
    clouds.notices[spare] = Notice(NoticeKind.TERMINATE, AT)
    clouds.run(loop, lambda: len(aws.alive()) == 3)

    # Then another one is bought although the cloud lists the first as running
    row = clouds.control.machines()[spare]
    assert (row["state"], row["notice_at"]) == ("leaving", AT)
