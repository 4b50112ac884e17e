"""A cloud that is slow, silent, or busy delays neither decisions nor other clouds."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support.fleet_records import PACKAGE, job_spec
from support.provider_backends import AwsBackend, GcpBackend, sleeper
from support.two_clouds import TwoClouds
from support.waiting import PATIENCE, await_truth

from benchmarks.measure.control.cloud import POOL, SimulatedCloud
from vcasgd.controller.fleet.cloud_cache import CloudCache
from vcasgd.controller.fleet.cloud_calls import MAX_CALLS, THREADS, CallKind, CloudCalls, NotLeading
from vcasgd.controller.fleet.costs import CostLedger
from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.errors import CloudUnavailable
from vcasgd.fleet.pools import LocalPoolSpec
from vcasgd.fleet.providers.local.provider import LocalProvider
from vcasgd.settings import Settings
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.jobs import Jobs

MANY = 300


def submit(jobs: Jobs, pool: str, machines: int) -> str:
    workers = {"min": machines, "max": machines, "pools": [pool]}
    return jobs.submit(job_spec(workers=workers, subtasks_per_epoch=MANY), PACKAGE).id


@pytest.mark.ci
def test_a_silent_cloud_delays_no_decision_about_another_one(
    clouds: TwoClouds, jobs: Jobs, ledger: RedisClient, aws: AwsBackend, gcp: GcpBackend
) -> None:
    # Given a machine in a cloud that then answers no call any more, not even to a new controller
    first = submit(jobs, aws.pool, 1)
    clouds.run(clouds.controller(), clouds.control.machines)
    (machine,) = clouds.control.machines()
    aws.ec2.answers.clear()
    loop = clouds.controller()

    # When another cloud is to provide machines, and then others are to replace them
    submit(jobs, gcp.pool, 2)
    clouds.run(loop, lambda: gcp.alive() and gcp.alive() <= clouds.joined())
    lost = gcp.alive()
    assert len(lost) == 2
    for one in lost:
        gcp.remove(one)
    clouds.run(loop, lambda: len(gcp.alive() - lost) == 2 and aws.ec2.waiting > 0)

    # Then it does, and the machine of the first one is neither lost nor bought again
    assert machine in clouds.control.machines()
    assert CostLedger(ledger).payers[machine] == first
    aws.ec2.answers.set()
    jobs.cancel(first)
    clouds.run(loop, lambda: not aws.alive())
    assert aws.ec2.calls.count("CreateFleet") == 1


def test_answers_that_are_not_understood_are_outages(
    clouds: TwoClouds, jobs: Jobs, aws: AwsBackend
) -> None:
    submit(jobs, aws.pool, 1)
    loop = clouds.controller()
    aws.ec2.garbled = {"CreateFleet"}

    # A launch that may have happened is retried after a pause.
    clouds.run(loop, lambda: clouds.control.launches().get(aws.pool))
    asked = aws.ec2.calls.count("CreateFleet")
    for _ in range(5):
        loop.round()
    assert aws.ec2.calls.count("CreateFleet") <= asked + 1
    # And no machine counts as lost
    aws.ec2.garbled = set()
    clouds.run(loop, lambda: aws.alive() and aws.alive() <= clouds.joined())
    aws.ec2.garbled = {"DescribeInstances"}
    for _ in range(3):
        loop.round()
    assert clouds.control.machines().keys() == aws.alive()


def test_a_controller_that_dies_during_a_launch_leaks_no_machine(
    clouds: TwoClouds, jobs: Jobs, aws: AwsBackend
) -> None:
    # Given a controller that never gets the answer to its launch
    job, made, gone = submit(jobs, aws.pool, 3), threading.Event(), threading.Event()

    def lose_the_answer() -> None:
        made.set()
        gone.wait()

    aws.ec2.made = lose_the_answer
    clouds.run(clouds.controller(), made.is_set)
    await_truth(lambda: len(aws.alive()) == 3)
    bought = aws.alive()

    # When the next one takes over
    loop = clouds.controller()
    clouds.run(loop, lambda: clouds.control.machines().keys() == bought)
    gone.set()

    # Then it uses the machines, and ends them
    assert aws.alive() == bought
    jobs.cancel(job)
    clouds.run(loop, lambda: not aws.alive())


@pytest.mark.ci
def test_boot_reports_of_many_machines_stay_within_the_quota_of_a_cloud(
    tmp_path: Path, ledger: RedisClient, gcp: GcpBackend
) -> None:
    # Given machines that boot, of which the cloud reports each by a call of its own
    many = MAX_CALLS + 4
    gcp.provider().launch(gcp.pool, many, sleeper(), "t1")
    file, now = tmp_path / "pools.yaml", [0.0]
    file.write_text(json.dumps({"pools": [gcp.document()]}))
    settings = Settings(home=tmp_path, cluster="test", pools=file, compute_url=gcp.url)
    pools, calls = PoolRegistry(settings, Control(ledger)), CloudCalls()
    cloud = CloudCache(pools, calls, (), lambda: now[0])
    await_truth(lambda: (cloud.refresh(), len(cloud.machines()) == many)[1])
    last = cloud.machines()[-1].id
    gcp.report_boot_error(last, "no disk")
    gcp.compute.requests.clear()

    # When the controller asks for all reports in each second
    for _ in range(many // 2):
        now[0] += 1.0
        found = cloud.boot_errors(cloud.machines())
        calls.collect(PATIENCE, CallKind.BOOT_REPORT)

    # Then the cloud gets four calls a second at most, nothing beside them, and leaves none out
    assert found == {last: "no disk"}
    assert many <= len(gcp.compute.requests) <= many // 2 * 4
    assert all("getGuestAttributes" in path for _, path in gcp.compute.requests)


class CountingCloud(SimulatedCloud):
    """Cloud that counts the calls that change it."""

    def __init__(self) -> None:
        super().__init__(MANY, [io.StringIO()])
        self.calls: Counter[str] = Counter()

    def launch(self, *arguments: Any, **options: Any) -> list[str]:
        self.calls["launch"] += 1
        return super().launch(*arguments, **options)

    def terminate(self, *machine_ids: str) -> None:
        self.calls["terminate"] += 1
        super().terminate(*machine_ids)


def test_many_machines_are_replaced_and_ended_in_few_calls(clouds: TwoClouds, jobs: Jobs) -> None:
    # Given many machines
    cloud = CountingCloud()
    loop, job = clouds.controller_of(cloud, MANY), submit(jobs, POOL, MANY)
    clouds.run(loop, lambda: len(cloud.workers()) == MANY)

    # When all disappear
    cloud.calls.clear()
    cloud.lose(MANY)
    clouds.run(loop, lambda: len(cloud.workers()) == MANY)

    # Then one call for each zone replaces them
    assert cloud.counts()["launched"] == 2 * MANY
    assert cloud.calls == {"launch": 3}

    # And when they are no longer needed, one ends all of them
    cloud.calls.clear()
    jobs.cancel(job)
    clouds.run(loop, lambda: not cloud.machines())
    assert cloud.calls == {"terminate": 1}


class TestCloudCalls:
    def test_of_equal_calls_one_is_under_way(self, tmp_path: Path) -> None:
        calls, provider, answers = CloudCalls(), local(tmp_path), list[int]()
        release = threading.Event()

        def take(call: Future[int]) -> None:
            answers.append(call.result())

        def slow() -> int:
            release.wait()
            return 1

        assert calls.start(CallKind.LAUNCH, provider, "market", slow, take)
        assert not calls.start(CallKind.LAUNCH, provider, "market", slow, take)
        assert calls.start(CallKind.LIST, provider, "", lambda: 2, take)
        await_truth(lambda: (calls.collect(), answers)[1])
        assert answers == [2]
        release.set()
        await_truth(lambda: (calls.collect(), answers == [2, 1])[1])
        assert calls.start(CallKind.LAUNCH, provider, "market", slow, take)

    def test_no_more_calls_are_accepted_than_will_soon_be_made(self, tmp_path: Path) -> None:
        calls, provider, release = CloudCalls(), local(tmp_path), threading.Event()
        started = [
            calls.start(CallKind.TERMINATE, provider, str(number), release.wait, Future.result)
            for number in range(MAX_CALLS + 1)
        ]
        release.set()
        assert [call is not None for call in started] == [True] * MAX_CALLS + [False]

    def test_a_call_that_waited_is_not_made_after_another_controller_took_over(
        self, tmp_path: Path
    ) -> None:
        leads, release, made = threading.Event(), threading.Event(), list[str]()
        leads.set()
        calls, provider = CloudCalls(leads.is_set), local(tmp_path)
        errors: list[BaseException | None] = []
        for number in range(THREADS[CallKind.LAUNCH]):
            calls.start(CallKind.LAUNCH, provider, str(number), release.wait, Future.result)
        calls.start(
            CallKind.LAUNCH, provider, "late", lambda: made.append("late"),
            lambda call: errors.append(call.exception()),
        )  # fmt: skip
        leads.clear()
        release.set()
        await_truth(lambda: (calls.collect(), errors)[1])
        assert isinstance(errors[0], NotLeading)
        assert made == []

    def test_an_error_is_logged_and_delays_no_other_answer(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        calls, provider, answers = CloudCalls(), local(tmp_path), list[str]()

        def fail(error: Exception) -> str:
            raise error

        def take(call: Future[str]) -> None:
            answers.append(call.result())

        errors = {"refused": CloudUnavailable("no answer"), "broken": KeyError("defect")}
        for name, error in errors.items():
            calls.start(CallKind.REQUEST, provider, name, lambda error=error: fail(error), take)
        calls.start(CallKind.REQUEST, provider, "good", lambda: "good", take)
        with caplog.at_level(logging.WARNING):
            await_truth(lambda: (calls.collect(), answers and len(caplog.records) == 3)[1])
        assert {record.levelname for record in caplog.records} == {"WARNING", "ERROR"}
        assert answers == ["good"]

    def test_a_replaced_provider_is_closed_after_its_last_call(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls, provider, release = CloudCalls(), local(tmp_path), threading.Event()
        closed: list[bool] = []
        monkeypatch.setattr(provider, "close", lambda: closed.append(True))
        calls.start(CallKind.LIST, provider, "", release.wait, Future.result)
        calls.retire(provider)
        calls.collect()
        assert closed == []
        release.set()
        await_truth(lambda: (calls.collect(), closed)[1])


def local(home: Path) -> LocalProvider:
    return LocalProvider(
        home, "test", LocalPoolSpec(name="local", provider="local", max_machines=1)
    )
