"""Events about machines, and what the controller publishes of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.controllers import Cloud, Controllers
from support.fleet_records import NOW, PACKAGE, events_of, job_spec
from support.waiting import PATIENCE, await_truth

from vcasgd.controller.fleet.cloud_cache import LAUNCH_UNLISTED_SECONDS, NEVER_APPEARED
from vcasgd.controller.fleet.cloud_calls import BACKOFF_SECONDS
from vcasgd.controller.fleet.view import WRITE_ALL_SECONDS
from vcasgd.errors import CloudUnavailable, QuotaExceeded
from vcasgd.fleet.observed import Limits
from vcasgd.fleet.pools import JoinPoolSpec
from vcasgd.schemas.costs import Offer
from vcasgd.schemas.fleet import Machine, MachineState
from vcasgd.spec.access import Scope
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import MACHINES
from vcasgd.store.ledger.api_tokens import ApiTokens
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.worker_names import worker_name


def submit(
    jobs: Jobs, machines: int = 1, max_price_per_hour: float | None = None, **options: Any
) -> str:
    workers, stop = {"min": machines, "max": machines}, {"max_cost_usd": 5.0}
    if max_price_per_hour is not None:
        workers, stop = {**workers, "max_price_per_hour": max_price_per_hour}, {}
    spec = job_spec(workers=workers, stop=stop, subtasks_per_epoch=100)
    return jobs.submit(spec, PACKAGE, **options).id


def test_rebalance_advice_is_reported_once(controllers: Controllers, jobs: Jobs) -> None:
    job, cloud = submit(jobs), Cloud()
    loop, (one,) = controllers.run_with(cloud, 1)

    cloud.change(one.id, advised_at=NOW)
    loop.round()
    loop.round()
    controllers.start(cloud).round()

    (event,) = events_of(jobs, job, "rebalance-advice")
    assert event["details"] == {"machine": one.id}


@pytest.mark.parametrize("seen", [True, False])
def test_a_machine_whose_owner_stops_it_is_no_loss(
    controllers: Controllers, jobs: Jobs, seen: bool
) -> None:
    # Given a machine that joined, and works for a job
    job, cloud = submit(jobs), Cloud()
    loop, (one,) = controllers.run_with(cloud, 1)
    cloud.boots = False

    # When its owner ends it, which takes longer than a round, or less
    if seen:
        cloud.change(one.id, state=MachineState.LEAVING, notice_at=NOW, leaves=True)
        loop.round()
    else:
        # It is no longer among those that joined.
        loop._fleet.pools.specs[one.pool] = JoinPoolSpec(name=one.pool, provider="join")
    cloud.take(one.id)
    loop.round()

    # Then the job has lost nothing, and says what happened
    record = jobs.get(job)
    assert (record.evictions, record.kills) == (0, 0)
    assert not events_of(jobs, job, "eviction-notice")
    (event,) = events_of(jobs, job, "worker-left")
    assert event["details"] == {"machine": one.id}
    timeline = jobs.timelines(job)[one.id]
    assert (timeline["lost"], timeline["reason"]) == (False, "it left")


def interrupt(cloud: Cloud, machine: str) -> None:
    cloud.change(machine, state=MachineState.LEAVING)


@pytest.mark.parametrize(
    ("boots", "prepare", "reported"),
    [
        pytest.param(False, None, True, id="boots"),
        pytest.param(False, interrupt, False, id="has a notice"),
        pytest.param(True, None, False, id="has joined"),
    ],
)
def test_machine_that_disappears_before_it_joins_is_reported_once(
    controllers: Controllers,
    jobs: Jobs,
    boots: bool,
    prepare: Callable[[Cloud, str], None] | None,
    reported: bool,
) -> None:
    job, cloud = submit(jobs), Cloud()
    cloud.boots = boots
    loop = controllers.start(cloud)
    controllers.run(loop, cloud.machines)
    (one,) = cloud.machines()
    if prepare:
        prepare(cloud, one.id)
        loop.round()

    # When it disappears, and another controller has not seen it in the cluster itself
    cloud.take(one.id)
    loop = controllers.start(cloud)
    for _ in range(2):
        loop.round()

    events = events_of(jobs, job, "boot-failed")
    assert [each["details"]["machine"] for each in events] == [one.id] * reported


def test_a_job_whose_machines_boot_says_so_until_one_works(
    controllers: Controllers, jobs: Jobs
) -> None:
    job, cloud = submit(jobs, 2), Cloud()
    cloud.boots = False
    loop = controllers.start(cloud)
    controllers.run(loop, lambda: len(cloud.machines()) == 2)
    found = jobs.get(job)
    assert (found.waiting, found.queued) == ("2 machines are booting", False)

    cloud.join()
    controllers.run(loop, cloud.workers)
    assert jobs.get(job).waiting is None


def test_machine_that_does_not_boot_is_reported_once_until_it_is_gone(
    controllers: Controllers, jobs: Jobs
) -> None:
    # Given a machine that says why it doesn't boot, and whose cloud lists it after its end
    job, cloud = submit(jobs), Cloud(1)
    cloud.boots, cloud.ends, cloud.problem = False, False, "no space left on device"
    loop = controllers.start(cloud)
    controllers.run(loop, lambda: events_of(jobs, job, "boot-failed"))
    (one,) = cloud.machines()

    # When it is to be ended again, also by another controller
    asked = cloud.asked
    controllers.run(loop, lambda: cloud.asked > asked)
    asked, loop = cloud.asked, controllers.start(cloud)
    controllers.run(loop, lambda: cloud.asked > asked)
    # And has disappeared
    cloud.take(one.id)
    loop.round()

    (event,) = events_of(jobs, job, "boot-failed")
    assert event["details"]["why"] == "did not boot: no space left on device"


def test_machine_that_the_controller_ends_before_it_joins_is_not_reported(
    controllers: Controllers, jobs: Jobs
) -> None:
    job, cloud = submit(jobs), Cloud()
    cloud.boots = False
    loop = controllers.start(cloud)
    controllers.run(loop, cloud.machines)

    # Its budget does not pay for it any longer.
    jobs.cancel(job)
    controllers.run(loop, lambda: not cloud.machines())

    assert events_of(jobs, job, "boot-failed") == []


def test_launched_machine_is_unlisted_for_a_limited_time(
    controllers: Controllers, jobs: Jobs
) -> None:
    # Given a machine that was launched, and that its provider does not list
    job, cloud = submit(jobs), Cloud()
    cloud.lists = False
    loop = controllers.start(cloud)
    controllers.run(loop, lambda: cloud.counts()["launched"])

    # Then no other one is bought meanwhile
    controllers.ahead += LAUNCH_UNLISTED_SECONDS / 2
    for _ in range(3):
        loop.round()
    assert cloud.counts()["launched"] == 1
    assert events_of(jobs, job, "boot-failed") == []

    # And later it counts as never launched, once
    cloud.lists = True
    controllers.ahead += LAUNCH_UNLISTED_SECONDS / 2
    controllers.run(loop, cloud.workers)
    (event,) = events_of(jobs, job, "boot-failed")
    assert event["details"]["why"] == NEVER_APPEARED


class _Small(Cloud):
    """A cloud whose account may have one machine; its answer to that launch takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def launch(self, *arguments: Any, **options: Any) -> list[str]:
        if options["zones"] != ("a",):
            raise QuotaExceeded("too many")
        assert self.answers.wait(PATIENCE)
        return super().launch(*arguments, **options)


def test_quota_that_a_launch_reveals_counts_launches_under_way(
    controllers: Controllers, jobs: Jobs
) -> None:
    # Given launches in two zones, of which the later one is refused before the other is granted
    submit(jobs, 2)
    loop = controllers.start(cloud := _Small())
    control = Control(controllers.ledger)
    controllers.run(loop, lambda: "quota" in str(control.pools().values()))
    cloud.answers.set()
    controllers.run(loop, cloud.workers)

    # When the machine is lost, then another one gets its place
    cloud.lose(1)
    controllers.run(loop, lambda: cloud.counts()["launched"] == 2)


class _Limited(Cloud):
    """A cloud with one zone that refuses launches as a whole beyond three machines."""

    def offers(self, pool: str) -> list[Offer]:
        return [each for each in super().offers(pool) if each.zone == "a"]

    def launch(self, pool: str, count: int, *arguments: Any, **options: Any) -> list[str]:
        if len(self.machines()) + count > 3:
            raise QuotaExceeded("too many")
        return super().launch(pool, count, *arguments, **options)


def test_launch_beyond_a_quota_is_repeated_with_half_of_its_machines(
    controllers: Controllers, jobs: Jobs
) -> None:
    submit(jobs, 8)
    cloud = _Limited(8)
    loop = controllers.start(cloud)

    def works() -> bool:
        controllers.ahead += BACKOFF_SECONDS[1]
        return len(cloud.workers()) == 2

    controllers.run(loop, works)

    (pool,) = Control(controllers.ledger).pools().values()
    assert "the account may have 2 such machines" in pool["reason"]


class _Silent(Cloud):
    """Machines whose provider launches, and can't list them for a while."""

    silent = False

    def machines(self) -> list[Machine]:
        if self.silent:
            raise CloudUnavailable("throttled")
        return super().machines()


def test_launched_machine_of_a_silent_cloud_is_not_bought_again(
    controllers: Controllers, jobs: Jobs
) -> None:
    # Given a cloud that lists no machines after it has launched one
    job, cloud = submit(jobs), _Silent()
    loop = controllers.start(cloud)
    loop.round()
    cloud.silent = True
    controllers.run(loop, lambda: cloud.counts()["launched"])

    # When that lasts for longer than it takes to list a machine
    controllers.ahead += 2 * LAUNCH_UNLISTED_SECONDS
    for _ in range(3):
        loop.round()
    cloud.silent = False
    controllers.run(loop, cloud.workers)

    # Then the machine works, and is the only one
    assert cloud.counts()["launched"] == 1
    assert events_of(jobs, job, "boot-failed") == []


def test_machine_that_a_job_has_given_up_is_not_its_loss(
    controllers: Controllers, jobs: Jobs
) -> None:
    # Given a machine whose worker was asked to leave, because it has become too expensive
    job, cloud = submit(jobs, max_price_per_hour=1.0), Cloud(1)
    controllers.settings = controllers.settings.model_copy(update={"idle_seconds": 1e6})
    loop, (one,) = controllers.run_with(cloud, 1)
    cloud.change(one.id, price_per_hour=2.0)

    def left() -> bool:
        controllers.ahead += Limits.dear_seconds
        return not cloud.workers()

    controllers.run(loop, left)
    for _ in range(4):
        controllers.run(loop, left)

    # When it is lost later
    cloud.take(one.id)
    loop.round()

    # Then the job has lost nothing
    assert (jobs.get(job).kills, events_of(jobs, job, "worker-killed")) == (0, [])


def test_machine_that_an_earlier_controller_ended_is_no_loss(
    controllers: Controllers, jobs: Jobs
) -> None:
    # Given a machine that is ended while it works for a job, because of its worker
    job, cloud = submit(jobs), Cloud(1)
    loop, (one,) = controllers.run_with(cloud, 1)
    jobs.workers.quarantine(job, worker_name(one.id, job), "its updates are wrong")
    loop.round()
    await_truth(lambda: not cloud.machines())

    # When another controller is the first one to see that it is gone
    controllers.start(cloud).round()

    # Then the job has lost nothing
    assert (jobs.get(job).kills, events_of(jobs, job, "worker-killed")) == (0, [])
    timeline = jobs.timelines(job)[one.id]
    assert (timeline["lost"], timeline["reason"]) == (False, "its worker is in quarantine")


def test_machine_that_did_not_end_can_be_lost_later(controllers: Controllers, jobs: Jobs) -> None:
    # Given a machine that was to be ended, as nothing used it, and continued
    job, cloud = submit(jobs), Cloud(1)
    loop, (one,) = controllers.run_with(cloud, 1)
    jobs.cancel(job)
    cloud.ends = False

    def asked() -> bool:
        controllers.ahead += controllers.settings.idle_seconds
        return bool(cloud.asked)

    controllers.run(loop, asked)

    # When another job uses it, and it is lost
    job = submit(jobs)
    controllers.run(loop, lambda: worker_name(one.id, job) in cloud.workers())
    cloud.take(one.id)
    loop.round()

    assert jobs.get(job).kills == 1
    assert jobs.timelines(job)[one.id]["lost"]


def test_new_ledger_gets_no_machines_of_launches_before_it(
    ledger: RedisClient, controllers: Controllers, jobs: Jobs
) -> None:
    # Given a cloud that knows the launches of a stack whose ledger was lost
    submit(jobs)
    _, (old,) = controllers.run_with(cloud := Cloud(), 1)
    cloud.lose(1)
    ledger.flushall()

    # When the next stack needs a machine
    job = submit(jobs)
    _, (new,) = controllers.run_with(cloud, 1)

    # Then it gets a new one at once
    assert new.id != old.id
    assert events_of(jobs, job, "boot-failed") == []


def test_only_changed_machines_are_published(
    ledger: RedisClient, controllers: Controllers, jobs: Jobs
) -> None:
    submit(jobs, 3)
    cloud, control = Cloud(), Control(ledger)
    loop, (same, other, gone) = controllers.run_with(cloud, 3)
    ledger.delete(MACHINES)

    cloud.change(other.id, state=MachineState.LEAVING)
    cloud.take(gone.id)
    loop.round()

    published = control.machines().keys()
    assert other.id in published
    assert not {same.id, gone.id} & published
    # What the ledger lost comes back with the next complete write
    controllers.ahead += WRITE_ALL_SECONDS
    loop.round()
    assert {same.id, other.id} <= control.machines().keys()


def test_a_limit_is_named_once_in_the_events(
    ledger: RedisClient, controllers: Controllers, jobs: Jobs
) -> None:
    ApiTokens(ledger).create("ann", Scope.SUBMIT, max_machines=2)
    limited, other = submit(jobs, 4, owner="ann"), submit(jobs, 2)
    loop = controllers.start(Cloud())
    for _ in range(2):
        loop.round()

    (event,) = events_of(jobs, limited, "machines-limited")
    assert event["text"] == "it may have 2 machines: all jobs of ann together may have 2 machines"
    assert events_of(jobs, other, "machines-limited") == []
