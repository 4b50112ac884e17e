"""Events about machines, and machines that a provider has not listed yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.fleet_records import NOW, PACKAGE, events_of, job_spec, machine

from vcasgd.controller.fleet.cloud_cache import LAUNCH_UNLISTED_SECONDS, CloudCache
from vcasgd.controller.fleet.cloud_calls import CloudCalls
from vcasgd.controller.fleet.events import FleetEvents
from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.fleet.providers.base import Machine, MachineState
from vcasgd.settings import Settings
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.jobs import Jobs

ROW = Machine("m-1", "east", MachineState.RUNNING, NOW, None, "", 1.0, True, joined=False)


def test_rebalance_advice_is_reported_once(ledger: RedisClient, jobs: Jobs) -> None:
    job = jobs.submit(job_spec(), PACKAGE).id
    events = FleetEvents(Control(ledger), jobs)
    for advised_at in (None, NOW, NOW):
        events.publish({"m-1": replace(ROW, joined=True, job=job, advised_at=advised_at)}, {})

    (event,) = events_of(jobs, job, "rebalance-advice")
    assert event["details"] == {"machine": "m-1"}


def test_machine_that_disappears_before_it_joins_is_reported_once(
    ledger: RedisClient, jobs: Jobs
) -> None:
    control = Control(ledger)
    events = FleetEvents(control, jobs)
    events.publish(
        {
            "failed-boot": ROW,
            "terminated": ROW,
            "interrupted": replace(ROW, state=MachineState.LEAVING),
            "lost": replace(ROW, was_up=True),
            "present": ROW,
        },
        {},
    )
    # A new controller has not seen the lost machine in the cluster and reports it as not up.
    events = FleetEvents(control, jobs)
    rows = {name: Machine.from_row(each) for name, each in control.machines().items()}
    events.publish({**rows, "lost": ROW}, {})
    events.mark_terminated("terminated", "idle")

    assert events.never_joined({"present"}) == {"failed-boot": ROW}
    events.publish({"present": ROW}, {})
    assert events.never_joined({"present"}) == {}


def test_launched_machine_is_unlisted_for_a_limited_time(
    tmp_path: Path, ledger: RedisClient
) -> None:
    cloud = CloudCache(PoolRegistry(Settings(home=tmp_path), Control(ledger)), CloudCalls())
    cloud.launched([machine("m-1")], NOW)

    assert cloud.machines(NOW + LAUNCH_UNLISTED_SECONDS / 2) == []
    assert [one.id for one in cloud.unlisted()] == ["m-1"]
    assert cloud.take_lapsed() == []
    cloud.machines(NOW + LAUNCH_UNLISTED_SECONDS)
    assert cloud.unlisted() == []
    (blame,) = cloud.take_lapsed()
    assert (blame.machine_id, blame.pool) == ("m-1", machine("m-1").pool)
    assert cloud.take_lapsed() == []
