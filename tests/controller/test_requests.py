"""Each request of a user has a result, whatever its provider says."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support.controllers import Cloud, Controllers
from support.fleet_records import PACKAGE, job_spec
from support.provider_backends import AwsBackend, GcpBackend
from support.two_clouds import TwoClouds
from support.waiting import await_truth

from vcasgd.controller.fleet.loop import FleetLoop
from vcasgd.errors import StoreDenied
from vcasgd.fleet.providers.aws_calls import ATTEMPTS
from vcasgd.fleet.providers.base import Boot
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.jobs import Jobs


def result_of(
    clouds: TwoClouds, loop: FleetLoop, kind: str = "evict", **details: object
) -> dict[str, Any]:
    """Return the result of a request to a controller."""
    request = clouds.control.request(kind, **details)

    def answered() -> bool:
        result = clouds.control.result(request)
        return result is not None and result["state"] != "waiting"

    clouds.run(loop, answered)
    result = clouds.control.result(request)
    assert result is not None
    return result


def test_requests_end_with_what_the_provider_says(
    clouds: TwoClouds, aws: AwsBackend, gcp: GcpBackend
) -> None:
    # Given a machine
    (machine,) = aws.provider().launch(aws.pool, 1, Boot(("sleep", "9")), "t1")
    loop = clouds.controller()

    # When a user asks a controller that hasn't listed it yet for what EC2 can't do, for what it
    # refuses, and for unknown machines
    notice = result_of(clouds, loop, machine=machine)
    unknown = result_of(clouds, loop, machine="i-0", kill=True)
    nonsense = result_of(clouds, loop, "dance", machine=machine)

    # Then each request fails with the reason
    assert (notice["state"], unknown["state"], nonsense["state"]) == ("failed", "failed", "failed")
    assert "no notice" in (notice["problem"] or "")
    assert "Fault Injection" in (notice["remedy"] or "")
    assert unknown["problem"] == "i-0: no provider lists this machine"

    # And one that the provider accepts is done
    for cloud, kill in ((aws, True), (gcp, False)):
        (machine,) = cloud.provider().launch(cloud.pool, 1, Boot(("sleep", "9")), "t2")
        loop = clouds.controller()
        # It has no work, so the next round ends it, after the request.
        clouds.run(loop, lambda one=machine: one in clouds.control.machines())
        assert result_of(clouds, loop, machine=machine, kill=kill)["state"] == "done"
        assert not kill or machine not in cloud.alive()


@pytest.mark.ci
def test_requests_do_not_wait_for_a_cloud_that_is_silent(
    clouds: TwoClouds, jobs: Jobs, aws: AwsBackend, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a machine of a cloud that has just stopped answering
    workers = {"min": 1, "max": 1, "pools": [aws.pool]}
    jobs.submit(job_spec(workers=workers, subtasks_per_epoch=1000), PACKAGE)
    loop = clouds.controller()
    clouds.run(loop, lambda: aws.alive() and aws.alive() <= clouds.joined())
    (machine,) = aws.alive()
    for _ in range(ATTEMPTS):
        aws.ec2.refuse("DescribeInstances", "Unavailable", 503)
    clouds.run(loop, lambda: "the machines can't be listed" in caplog.text)
    aws.ec2.answers.clear()
    waited = aws.ec2.waiting

    # When a user asks for it, then the answer comes at once
    result = result_of(clouds, loop, machine=machine, kill=True)
    assert result["state"] == "failed"
    assert "aws does not list its machines: Unavailable" in result["problem"]
    assert aws.ec2.waiting <= waited + 1, "only the next list waits"


def test_request_that_no_controller_took_in_time_fails(
    clouds: TwoClouds, aws: AwsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a request that was sent while there was no controller
    (machine,) = aws.provider().launch(aws.pool, 1, Boot(("sleep", "9")), "t1")
    request = clouds.control.request("evict", machine=machine, kill=True)

    # When one comes after the time for it
    monkeypatch.setattr("vcasgd.store.ledger.control.REQUEST_SECONDS", -1.0)
    loop = clouds.controller()

    def answer() -> dict[str, Any]:
        loop.round()
        return clouds.control.result(request) or {}

    await_truth(lambda: answer()["state"] != "waiting")

    # Then the machine, which may have another job by now, stays
    assert answer()["state"] == "failed"
    assert "no controller took the request" in answer()["problem"]
    assert "TerminateInstances" not in aws.ec2.calls


def test_request_that_waits_for_a_list_of_machines_outlives_its_controller(
    clouds: TwoClouds, aws: AwsBackend
) -> None:
    # Given a controller that does not know yet which machines there are, and a request for one
    (machine,) = aws.provider().launch(aws.pool, 1, Boot(("sleep", "9")), "t1")
    aws.ec2.answers.clear()
    loop = clouds.controller()
    request = clouds.control.request("evict", machine=machine, kill=True)
    clouds.run(loop, lambda: aws.ec2.waiting)
    loop.round()

    # When another one takes over, to which the cloud answers
    aws.ec2.answers.set()
    loop = clouds.controller()

    # Then it carries the request out
    clouds.run(loop, lambda: (clouds.control.result(request) or {})["state"] != "waiting")
    assert (clouds.control.result(request) or {})["state"] == "done"
    assert machine not in aws.alive()


class _Untold(Cloud):
    """Machines whose ledger takes no results as soon as one of them is killed."""

    def __init__(self, controllers: Controllers) -> None:
        super().__init__()
        self._ledger = controllers.ledger
        self.killed: list[str] = []

    def allow_results(self, *, allowed: bool = True) -> None:
        self._ledger.execute_command("ACL", "SETUSER", "default", "+set" if allowed else "-set")

    def kill(self, machine_id: str) -> None:
        self.killed.append(machine_id)
        self.allow_results(allowed=False)
        self.take(machine_id)


@pytest.mark.parametrize("dies", [False, True])
def test_result_that_the_ledger_did_not_take_is_recorded_later(
    controllers: Controllers, jobs: Jobs, *, dies: bool
) -> None:
    # Given a controller that could not record that it killed a machine
    jobs.submit(job_spec(workers={"min": 2, "max": 2}, subtasks_per_epoch=1000), PACKAGE)
    loop, (machine, _) = controllers.run_with(cloud := _Untold(controllers), 2)
    control = Control(controllers.ledger)
    request = control.request("evict", machine=machine.id, kill=True)
    try:
        with pytest.raises(StoreDenied):
            controllers.run(loop, lambda: False)
    finally:
        cloud.allow_results()

    # Then it does so later, or the next one, to which no provider lists the machine
    loop = controllers.start(cloud) if dies else loop
    controllers.run(loop, lambda: _state(control, request) != "waiting")
    assert _state(control, request) == "done"
    assert cloud.killed == [machine.id]


def test_request_waits_while_its_controller_does_not_lead(
    controllers: Controllers, jobs: Jobs
) -> None:
    # Given a controller that loses its lead when it has begun with a request
    jobs.submit(job_spec(workers={"min": 2, "max": 2}, subtasks_per_epoch=1000), PACKAGE)
    loop, (machine, _) = controllers.run_with(cloud := Cloud(), 2)
    control, asked = Control(controllers.ledger), threading.Event()

    def leads() -> bool:
        if threading.current_thread() is threading.main_thread():
            return True
        asked.set()
        return False

    controllers.leads = leads
    request = control.request("evict", machine=machine.id, kill=True)
    controllers.run(loop, asked.is_set)
    assert _state(control, request) == "waiting"

    # When it leads again, then it carries the request out
    controllers.leads = lambda: True
    controllers.run(loop, lambda: _state(control, request) != "waiting")
    assert _state(control, request) == "done"
    assert machine.id not in {one.id for one in cloud.machines()}


def _state(control: Control, request: str) -> str:
    return str((control.result(request) or {})["state"])
