"""Machines whose pool was removed from the pools file are listed until their end is confirmed."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.fleet_records import PACKAGE, events_of, job_spec
from support.provider_backends import AwsBackend, GcpBackend, sleeper
from support.two_clouds import TwoClouds
from support.waiting import await_truth

from vcasgd.controller.fleet.cloud_cache import VACATED_SECONDS, CloudCache
from vcasgd.controller.fleet.cloud_calls import CloudCalls
from vcasgd.controller.fleet.pools import RETRY_SECONDS, PoolRegistry
from vcasgd.errors import FleetError, SpecError
from vcasgd.settings import Settings
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.jobs import Jobs


def submit(jobs: Jobs, pool: str) -> str:
    workers = {"min": 1, "max": 1, "pools": [pool]}
    return jobs.submit(job_spec(workers=workers, subtasks_per_epoch=1000), PACKAGE).id


def rows(clouds: TwoClouds) -> list[dict[str, Any]]:
    return list(clouds.control.machines().values())


@pytest.mark.parametrize(("restarts", "renamed"), [(False, False), (True, False), (True, True)])
@pytest.mark.ci
def test_machines_of_a_clouds_last_pool_are_ended(
    clouds: TwoClouds, jobs: Jobs, aws: AwsBackend, gcp: GcpBackend, restarts: bool, renamed: bool
) -> None:
    # Given a job on a machine
    submit(jobs, aws.pool)
    loop = clouds.controller()
    clouds.run(loop, lambda: aws.alive() and aws.alive() <= clouds.joined())

    # When its pool is removed from the file, and no pool of its cloud is left, or one is
    others = [aws.document(name="new-name")] if renamed else []
    clouds.set_pools(gcp.document(), *others)
    if restarts:
        loop = clouds.controller()

    # Then it is marked, and ended
    clouds.run(loop, lambda: any(row["pool_removed"] for row in rows(clouds)))
    clouds.run(loop, lambda: not aws.alive() and not rows(clouds))
    assert clouds.control.pool_specs().keys() == {aws.pool}, "a late machine would be found, too"


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.ci
def test_machines_that_were_launched_when_their_pool_was_removed_are_ended(
    clouds: TwoClouds, jobs: Jobs, aws: AwsBackend, gcp: GcpBackend, restarts: bool
) -> None:
    submit(jobs, aws.pool)
    made, answer = threading.Event(), threading.Event()

    def hold_the_answer() -> None:
        made.set()
        answer.wait()

    aws.ec2.made = hold_the_answer
    loop = clouds.controller()
    clouds.run(loop, made.is_set)
    clouds.set_pools(gcp.document())
    if restarts:
        loop = clouds.controller()
    loop.round()
    answer.set()

    await_truth(aws.alive)
    clouds.run(loop, lambda: not aws.alive() and not rows(clouds))


@pytest.mark.ci
def test_a_pool_that_may_have_machines_can_not_move(
    clouds: TwoClouds, jobs: Jobs, aws: AwsBackend, gcp: GcpBackend
) -> None:
    # Given a machine, and an edit that would look for it in another region
    submit(jobs, aws.pool)
    loop = clouds.controller()
    clouds.run(loop, lambda: aws.alive() and aws.alive() <= clouds.joined())
    clouds.set_pools(gcp.document(), aws.moved())

    # Then neither a running controller nor a new one loses it
    for _ in range(5):
        loop.round()
    assert clouds.control.machines().keys() == aws.alive() != set()
    with pytest.raises(SpecError, match="may have machines in aws us-east-1"):
        clouds.controller()

    # And under another name, the pool can be there, and the machine is ended
    clouds.set_pools(gcp.document(), aws.moved(name="elsewhere"))
    clouds.run(loop, lambda: not aws.alive() and not rows(clouds))


@pytest.mark.parametrize("lacks", ["credentials", "library"])
@pytest.mark.ci
def test_machines_of_a_provider_that_can_t_be_reached_stay_listed(
    clouds: TwoClouds, jobs: Jobs, aws: AwsBackend, gcp: GcpBackend, lacks: str
) -> None:
    # Given a machine of a removed pool, and no access to its provider any more
    job = submit(jobs, aws.pool)
    clouds.run(clouds.controller(), lambda: aws.alive() and aws.alive() <= clouds.joined())
    machines = aws.alive()
    clouds.set_pools(gcp.document())
    with pytest.MonkeyPatch.context() as patch:
        if lacks == "credentials":
            patch.delenv("AWS_ACCESS_KEY_ID")
            patch.delenv("AWS_SECRET_ACCESS_KEY")
        else:
            patch.setitem(sys.modules, "boto3", None)
            patch.delitem(sys.modules, "vcasgd.fleet.providers.aws")
            patch.delitem(sys.modules, "vcasgd.fleet.providers.aws_calls")
        loop = clouds.controller()

        # When the controller can't end it
        clouds.run(loop, lambda: any(row["problem"] for row in rows(clouds)))
        for _ in range(3):
            loop.round()

        # Then it stays listed, with the reason, and its job gets one event
        assert clouds.control.machines().keys() == machines == aws.alive()
        (row,) = rows(clouds)
        assert lacks in row["problem"]
        assert row["pool_removed"]
        (event,) = events_of(jobs, job, "machine-unreachable")
        assert event["details"]["machine"] in machines

    # And when the access is restored, it is ended
    clouds.run(clouds.controller(), lambda: not aws.alive() and not rows(clouds))


def test_a_pool_without_machines_can_move(
    tmp_path: Path, ledger: RedisClient, aws: AwsBackend
) -> None:
    # Given a pool that had machines, and has had none for long
    now, control, file = [0.0], Control(ledger), tmp_path / "pools.yaml"
    file.write_text(json.dumps({"pools": [aws.document()]}))
    control.set_pool_specs({aws.pool: aws.document()})
    pools = PoolRegistry(Settings(home=tmp_path, pools=file), control)
    cloud = CloudCache(pools, CloudCalls(), (), lambda: now[0])

    def answered() -> bool:
        cloud.refresh()
        return cloud.complete

    await_truth(answered)
    pools.forget(cloud.vacated())
    assert control.pool_specs().keys() == {aws.pool}
    now[0] += VACATED_SECONDS
    pools.forget(cloud.vacated())
    assert control.pool_specs() == {}

    # Then it can be in another region
    file.write_text(json.dumps({"pools": [aws.moved()]}))
    assert pools.refresh()
    assert pools.specs[aws.pool].region == "eu-central-1"


def test_a_machine_that_is_gone_has_no_provider_any_more(
    tmp_path: Path, ledger: RedisClient, gcp: GcpBackend
) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(json.dumps({"pools": [gcp.document()]}))
    settings = Settings(home=tmp_path, cluster="test", pools=file, compute_url=gcp.url)
    now, calls = [0.0], CloudCalls()
    cloud = CloudCache(PoolRegistry(settings, Control(ledger)), calls, (), lambda: now[0])

    def listed() -> set[str]:
        now[0] += 10.0
        cloud.refresh()
        return {one.id for one in cloud.machines()}

    (machine,) = gcp.provider().launch(gcp.pool, 1, sleeper(), "t1")
    await_truth(listed)
    assert cloud.provider_of(machine).name == "gcp"

    gcp.remove(machine)
    await_truth(lambda: not listed())

    with pytest.raises(FleetError, match="no provider lists"):
        cloud.provider_of(machine)


def test_a_file_that_was_refused_is_taken_over_once_it_can_be(
    tmp_path: Path, ledger: RedisClient, aws: AwsBackend
) -> None:
    # Given an edit that moves a pool, which is refused, because the pool may have machines
    now, control, file = [0.0], Control(ledger), tmp_path / "pools.yaml"
    file.write_text(json.dumps({"pools": [aws.document()]}))
    control.set_pool_specs({aws.pool: aws.document()})
    pools = PoolRegistry(Settings(home=tmp_path, pools=file), control, clock=lambda: now[0])
    file.write_text(json.dumps({"pools": [aws.moved()]}))
    assert not pools.refresh()

    # When it has none any more
    pools.forget([aws.pool])
    assert not pools.refresh()
    now[0] += RETRY_SECONDS

    # Then the edit takes effect
    assert pools.refresh()
    assert pools.specs[aws.pool].region == "eu-central-1"


def test_a_removed_pool_is_forgotten_once_its_provider_lists_nothing(
    tmp_path: Path, ledger: RedisClient, gcp: GcpBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a removed pool that may have machines, whose provider can't be reached
    now, control = [0.0], Control(ledger)
    settings = Settings(home=tmp_path, compute_url=gcp.url, heartbeat=0.05)
    control.set_pool_specs({"gone": gcp.document(name="gone")})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "google.cloud", None)
        patch.delitem(sys.modules, "vcasgd.fleet.providers.gcp")
        patch.delitem(sys.modules, "vcasgd.fleet.providers.gcp_calls")
        pools = PoolRegistry(settings, control, clock=lambda: now[0])
        cloud = CloudCache(pools, CloudCalls(), (), lambda: now[0])
        cloud.refresh()
        cloud.vacated()
        now[0] += 2 * VACATED_SECONDS
        cloud.refresh()
        assert cloud.vacated() == []

    # When it can be reached again, and lists no machine
    now[0] += RETRY_SECONDS
    pools.refresh()

    def answered() -> bool:
        cloud.refresh()
        return bool(cloud.vacated())

    await_truth(answered)

    # Then the pool is forgotten, and its provider is closed
    pools.forget(cloud.vacated())
    assert control.pool_specs() == {}
    assert [each.name for each in pools.replaced] == ["gcp"]
    assert pools.providers.keys() == {"local"}
