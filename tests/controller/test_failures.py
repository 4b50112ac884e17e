"""Failures of workers expire, scale with the fleet, and don't include lost machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.api_harness import spec
from support.harness import Harness
from support.training import Training
from support.waiting import await_truth

from vcasgd.controller.fleet.workplaces import RestartBackoff
from vcasgd.controller.jobs.failures import (
    ATTEMPTS,
    FAILURE_SECONDS,
    MAX_FAILURES,
    at_fault,
    none_agree,
    recent,
    repeated,
    still_counting,
)
from vcasgd.errors import Cause
from vcasgd.spec.job import JobState
from vcasgd.store.ledger.job import PREPARE, PROCESS, Failure
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Leases
from vcasgd.worker_names import worker_name

NOW = 1e9
CRASH = Failure("w", PROCESS, "it ended", "", Cause.WORK, at=NOW, version=5)
ERROR = replace(CRASH, piece="train:7")


def failures(kind: Failure, number: int) -> list[Failure]:
    return [replace(kind, worker=f"w{each}") for each in range(number)]


@pytest.mark.parametrize(
    ("failure", "version", "counts"),
    [
        (CRASH, 5, True),
        (CRASH, 6, False),
        (replace(CRASH, piece="prepare"), 6, False),
        (ERROR, 6, True),
        (replace(ERROR, at=NOW - FAILURE_SECONDS), 5, False),
        (replace(CRASH, at=NOW - FAILURE_SECONDS), 5, False),
        (replace(CRASH, at=NOW + 60), 5, True),
        (replace(ERROR, at=0.0, fault=Cause.JOB), 9, True),
    ],
)
def test_a_failure_expires_with_time_and_progress(
    failure: Failure, version: int, counts: bool
) -> None:
    assert bool(still_counting(recent([failure], NOW), version)) is counts


@pytest.mark.parametrize(
    ("workers", "most"), [(0, 3), (1, 3), (30, 3), (31, 4), (1000, 100), (10_000, MAX_FAILURES)]
)
def test_crashes_scale_with_the_fleet(workers: int, most: int) -> None:
    assert repeated(failures(CRASH, most), workers)
    assert not repeated(failures(CRASH, most - 1), workers)


def test_a_work_item_fails_after_as_many_attempts_in_any_fleet() -> None:
    assert repeated(failures(ERROR, ATTEMPTS), 1000)
    assert not repeated(failures(ERROR, ATTEMPTS - 1), 1000)
    assert not repeated([ERROR] * ATTEMPTS, 2), "on one machine"


WRONG = replace(CRASH, piece=PREPARE, fault=Cause.MACHINE)
LOST_DATA = replace(CRASH, piece=PREPARE)


@pytest.mark.parametrize(
    ("failures", "prepared", "blamed"),
    [
        pytest.param([WRONG], True, True, id="other data"),
        pytest.param([WRONG], False, True, id="a missing setting, before anything is known"),
        pytest.param([CRASH] * 9, True, False, id="crashes"),
        pytest.param([ERROR] * 9, True, False, id="failures of work"),
        pytest.param([LOST_DATA] * 9, True, False, id="can't prepare the job for a moment"),
        pytest.param([LOST_DATA, replace(LOST_DATA, at=NOW + 600)], True, True, id="or for long"),
        pytest.param(
            [LOST_DATA, replace(LOST_DATA, at=NOW + 600)], False, False, id="and no machine can"
        ),
    ],
)
def test_machines_at_fault(failures: list[Failure], prepared: bool, blamed: bool) -> None:
    assert set(at_fault(failures, prepared=prepared)) == ({"w"} if blamed else set())


@pytest.mark.parametrize(
    ("wrong", "right", "lost", "seconds", "fails"),
    [
        pytest.param(0, 3, 0, 0, False, id="all agree"),
        pytest.param(1, 3, 0, 3000, False, id="one is wrong"),
        pytest.param(1, 1, 0, 3000, False, id="one of two, which isn't replaced"),
        pytest.param(2, 1, 0, 3000, False, id="and its replacement"),
        pytest.param(3, 1, 0, 0, True, id="all but the first"),
        pytest.param(3, 3, 0, 0, False, id="as many as not"),
        pytest.param(4, 3, 0, 0, True, id="more than not"),
        pytest.param(4, 0, 10, 3000, False, id="all others were evicted"),
        pytest.param(1, 0, 0, 0, False, id="the only one, whose replacement may be better"),
        pytest.param(1, 0, 0, 600, True, id="the only one, and there is no replacement"),
    ],
)
def test_a_job_fails_if_too_few_machines_are_right(
    wrong: int, right: int, lost: int, seconds: float, fails: bool
) -> None:
    blamed = {name: replace(WRONG, worker=name) for name in names("wrong", wrong)}
    workers = [*blamed, *names("right", right)]

    assert (none_agree(blamed, workers, lost, NOW + seconds) is not None) == fails


def names(kind: str, number: int) -> list[str]:
    return [worker_name(f"{kind}-{each}", "job") for each in range(number)]


def await_newer(harness: Harness, job: str, version: int) -> None:
    await_truth(lambda: harness.jobs.get(job).version > version)


def test_three_crashes_far_apart_do_not_fail_a_job(harness: Harness) -> None:
    # Given a job whose workers crash, and make progress in between
    training = Training(harness, samples=1000)
    training.start_with_job_loop()
    for number in range(2 * ATTEMPTS):
        harness.jobs.report_failure(training.job, replace(CRASH, worker=f"w{number}"))
        # The job loop goes by the version in the ledger, which follows that of the model
        await_newer(harness, training.job, harness.jobs.failures(training.job)[-1].version)

    assert harness.jobs.get(training.job).state is JobState.RUNNING


def test_three_crashes_without_progress_fail_a_job(harness: Harness) -> None:
    training = Training(harness)
    harness.start_job_loop()
    for number in range(ATTEMPTS):
        assert harness.jobs.get(training.job).state is JobState.STARTING
        harness.jobs.report_failure(training.job, replace(CRASH, worker=f"w{number}"))

    await_truth(lambda: harness.jobs.get(training.job).state is JobState.FAILED)
    assert harness.jobs.get(training.job).reason == "it ended"


class TestLostMachines:
    @pytest.fixture
    def job(self, jobs: Jobs) -> str:
        return jobs.submit(spec(), "0" * 64).id

    @pytest.fixture
    def backoff(self, jobs: Jobs) -> RestartBackoff:
        self.now = 0.0
        return RestartBackoff(jobs, 10.0, lambda: self.now)

    def test_a_machine_that_dies_after_its_worker_is_no_crash(
        self, jobs: Jobs, job: str, backoff: RestartBackoff
    ) -> None:
        backoff.record_end(worker_name("i-1", job), job, "killed")
        backoff.confirm({"i-1"})
        self.now = 9.0
        backoff.confirm({"i-2"})
        self.now = 11.0
        backoff.confirm({"i-1"})

        assert jobs.failures(job) == []

    def test_a_process_that_dies_alone_is_a_crash_once(
        self, jobs: Jobs, job: str, backoff: RestartBackoff
    ) -> None:
        worker = worker_name("i-1", job)
        backoff.record_end(worker, job, "killed")
        assert not backoff.may_start(worker)
        for self.now in (9.0, 11.0, 12.0):
            backoff.confirm({"i-1"})

        (failure,) = jobs.failures(job)
        assert (failure.worker, failure.piece) == (worker, PROCESS)
        assert failure.at == pytest.approx(jobs.now(), abs=60)

    def test_each_of_several_crashes_in_a_row_counts(
        self, jobs: Jobs, job: str, backoff: RestartBackoff
    ) -> None:
        worker = worker_name("i-1", job)
        for self.now in (0.0, 4.0, 9.0):
            backoff.record_end(worker, job, "killed")
        for self.now in (9.5, 10.0, 19.0, 30.0):
            backoff.confirm({"i-1"})

        assert len(jobs.failures(job)) == 3

    def test_crashes_of_long_ago_do_not_count(
        self, jobs: Jobs, job: str, backoff: RestartBackoff
    ) -> None:
        worker = worker_name("i-1", job)
        for _ in range(10):
            backoff.record_end(worker, job, "killed")
        self.now = 59.0
        assert not backoff.may_start(worker)
        self.now = 24 * 3600.0
        backoff.record_end(worker, job, "killed")
        self.now += 2.0
        assert backoff.may_start(worker)

    def test_a_machine_with_a_notice_is_no_crash(
        self, jobs: Jobs, job: str, backoff: RestartBackoff
    ) -> None:
        worker = worker_name("i-1", job)
        leases = Leases(jobs._ledger, job, worker, 10.0)
        leases.renew({"at": 1.0, "notice": "terminate"}, [])
        backoff.record_end(worker, job, "killed")
        self.now = 11.0
        backoff.confirm({"i-1"})

        assert jobs.failures(job) == []
