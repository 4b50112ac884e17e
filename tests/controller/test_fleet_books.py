"""What the controller remembers in the ledger: answers of pools, meters, speeds, labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.harness import RedisServer

from vcasgd.controller.fleet.boot import cache_name
from vcasgd.controller.fleet.clearance import ClearancePolicy
from vcasgd.controller.fleet.context import ControllerContext
from vcasgd.controller.fleet.costs import CostLedger
from vcasgd.controller.fleet.demands import Demands
from vcasgd.controller.fleet.events import FleetEvents, FleetRow
from vcasgd.controller.fleet.launch_history import BACKOFF_SECONDS, QUOTA_SECONDS, LaunchHistory
from vcasgd.controller.fleet.names import worker_name
from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.controller.fleet.speeds import MEASURE_SECONDS, Speeds
from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    NoCapacity,
    QuotaExceeded,
    Throttled,
)
from vcasgd.fleet.costs import report
from vcasgd.fleet.observed import JobDemand
from vcasgd.fleet.plan import Blame, Launch
from vcasgd.fleet.providers.base import Instance, InstanceState
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.clearance import Clearances
from vcasgd.store.ledger.costs import Costs, Workloads
from vcasgd.store.ledger.heartbeats import Heartbeat
from vcasgd.store.ledger.job import JobRecord, JobState
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Leases
from vcasgd.store.ledger.servers import Control

NOW = 10_000.0
HOUR = 3600.0
LAUNCH = Launch("east", 2, "token", "a", ("small",), True, ("A",))


def machine(name: str, launched_at: float = NOW, pool: str = "east", **more: Any) -> Instance:
    fields: dict[str, Any] = {
        "price_per_hour": 1.0, "on_demand_price_per_hour": 3.0, "zone": "a",
        "instance_type": "small", "spot": True, **more,
    }  # fmt: skip
    return Instance(
        id=name, pool=pool, state=InstanceState.RUNNING, launched_at=launched_at, notice_at=None,
        host="", **fields,
    )  # fmt: skip


@dataclass
class Stage:
    """A ledger, and what is in it."""

    home: Path
    ledger: RedisClient

    @property
    def jobs(self) -> Jobs:
        return Jobs(self.ledger)

    def events(self, job: str, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.jobs.events(job) if event["kind"] == kind]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("ledger"), durable=False)
    yield server
    server.end()


@pytest.fixture
def stage(server: RedisServer, tmp_path: Path) -> Stage:
    server.connection.flushall()
    return Stage(tmp_path, server.connection)


class TestMemory:
    @pytest.fixture
    def memory(self, stage: Stage) -> Callable[[], LaunchHistory]:
        """A controller's, each time that of a new one."""

        def new() -> LaunchHistory:
            memory = LaunchHistory(Control(stage.ledger))
            memory.load()
            return memory

        return new

    def test_no_capacity_blocks_one_zone_for_longer_each_time(
        self, memory: Callable[[], LaunchHistory]
    ) -> None:
        first, _ = BACKOFF_SECONDS
        for count in range(3):
            memory().refused(LAUNCH, NoCapacity("none left"), 0, NOW)
            market = memory().markets("east", NOW)["a", True]
            assert market.blocked_until == NOW + first * 2**count
            assert (market.launches, market.refused_since) == (count + 1, NOW)

        assert memory().pool("east").blocked_until == 0.0
        assert memory().reasons("east", NOW) == ["a (spot): none left"]
        assert memory().reasons("east", NOW + 10) == []
        memory().granted(LAUNCH)
        assert memory().markets("east", NOW)["a", True].refused_since is None
        assert memory().launches("east") == 4

    def test_a_quota_caps_the_pool_at_what_it_has(
        self, memory: Callable[[], LaunchHistory]
    ) -> None:
        memory().refused(LAUNCH, QuotaExceeded("too many"), 5, NOW)

        assert memory().quotas("east", NOW) == {True: 5}
        assert memory().quotas("east", NOW + QUOTA_SECONDS) == {}
        assert "quota: the account may have 5 machines of it: too many" in memory().reasons(
            "east", NOW
        )

    @pytest.mark.parametrize("error", [CloudUnavailable("down"), Throttled("slowly")])
    def test_who_may_have_launched_is_asked_again_under_the_same_token(
        self, memory: Callable[[], LaunchHistory], error: FleetError
    ) -> None:
        memory().refused(LAUNCH, error, 0, NOW)

        assert memory().markets("east", NOW) == {}
        assert memory().pool("east").blocked_until > NOW

    def test_what_time_alone_does_not_mend_concerns_the_whole_pool(
        self, memory: Callable[[], LaunchHistory]
    ) -> None:
        memory().refused(LAUNCH, CloudDenied("no key"), 0, NOW)

        assert memory().pool("east").reason == "no key"
        assert memory().markets("east", NOW)["a", True].launches == 1

    def test_a_market_whose_machines_never_join_is_left_alone_until_one_does(
        self, memory: Callable[[], LaunchHistory]
    ) -> None:
        blame = Blame("m-1", "east", "a", True, "did not join in time")
        waits = []
        for _ in range(2):
            memory().blamed(blame, NOW)
            memory().granted(LAUNCH)
            memory().blamed(blame, NOW)
            waits.append(memory().markets("east", NOW)["a", True].blocked_until - NOW)

        assert waits == [120, 480], "what is granted in between makes nothing good"
        memory().blamed(blame, NOW, BACKOFF_SECONDS)
        assert memory().markets("east", NOW)["a", True].blocked_until - NOW == 16
        memory().joined([machine("m-0", NOW - 1)])
        assert memory().markets("east", NOW)["a", True].refused_since == NOW
        memory().joined([machine("m-2", NOW + 1)])
        assert memory().markets("east", NOW)["a", True].refused_since is None


class Round:
    """A controller's books, as of one moment after the other."""

    def __init__(self, stage: Stage) -> None:
        self.ledger = stage.ledger
        self.jobs = stage.jobs
        self.start()

    def start(self) -> None:
        """Another controller."""
        self.books = CostLedger(self.ledger)

    def look(
        self, now: float, *machines: Instance, works_for: dict[str, str] | None = None,
        nodes: str = "", coming: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        known = frozenset(nodes.split())
        self.books.look(
            machines,
            nodes=known,
            joined=known,
            works_for=works_for or {},
            coming=coming,
            billing_seconds=60.0,
            now=now,
        )

    def amounts(self, job: str) -> dict[str, float]:
        return Costs(self.ledger).of(job)


class TestBooks:
    @pytest.fixture
    def round_(self, stage: Stage) -> Round:
        return Round(stage)

    def test_a_life_of_a_machine(self, round_: Round) -> None:
        one = machine("m-1")
        round_.books.launched([one], ["A"])
        round_.look(NOW + 20, one)
        assert round_.books.payers == {"m-1": "A"}
        round_.look(NOW + 30, one, nodes="m-1", works_for={"m-1": "A"})
        round_.look(NOW + 90, one, nodes="m-1")
        round_.look(NOW + 100, one, nodes="m-1", works_for={"m-1": "B"})
        round_.look(NOW + 150, one, nodes="m-1", works_for={"m-1": "B"})
        round_.look(NOW + 200)

        found = report(round_.amounts("A"))
        assert found.booting.seconds == pytest.approx(30)
        assert found.idle.seconds == pytest.approx(10)
        assert found.machine_seconds == pytest.approx(100)
        assert found.spent_usd == pytest.approx(100 / HOUR)
        assert found.on_demand_usd == pytest.approx(300 / HOUR)
        assert report(round_.amounts("B")).machine_seconds == pytest.approx(50)
        assert round_.books.payers == {}
        assert round_.books.ended("m-1")

    def test_a_restarted_controller_goes_on_where_the_meters_stand(self, round_: Round) -> None:
        one = machine("m-1")
        round_.books.launched([one], ["A"])
        for seconds in range(0, 100, 5):
            round_.start()
            round_.look(NOW + seconds, one)

        spent = round_.books.spent("A", NOW + 95)
        assert spent == pytest.approx(95 / HOUR), "what is not booked yet counts"
        assert report(round_.amounts("A")).spent_usd <= spent

    def test_two_controllers_do_not_book_twice(self, round_: Round) -> None:
        one = machine("m-1")
        round_.books.launched([one], ["A"])
        sleeper = CostLedger(round_.ledger)
        round_.look(NOW + 50, one)

        for at in (NOW + 50, NOW + 60):
            sleeper.look(
                [one], nodes=None, joined=(), works_for={}, coming=(), billing_seconds=60.0, now=at
            )

        assert report(round_.amounts("A")).machine_seconds == pytest.approx(60)

    def test_a_launch_that_never_was_costs_nothing(self, round_: Round) -> None:
        round_.books.launched([machine("m-1")], ["A"])
        round_.look(NOW + 30, coming=("m-1",))
        assert round_.books.payers == {"m-1": "A"}
        round_.look(NOW + 90)

        assert round_.amounts("A").get("east|spot|booting|usd", 0.0) == 0.0
        assert round_.books.payers == {}

    def test_a_short_life_costs_a_minute(self, round_: Round) -> None:
        round_.look(NOW + 5, machine("m-1"), works_for={"m-1": "A"})
        round_.look(NOW + 10)

        assert report(round_.amounts("A")).machine_seconds == pytest.approx(60)

    def test_a_machine_that_is_listed_again_is_not_paid_twice(self, round_: Round) -> None:
        one = machine("m-1")
        round_.look(NOW + 100, one, works_for={"m-1": "A"})
        round_.look(NOW + 110)
        round_.look(NOW + 130, one, works_for={"m-1": "A"})
        round_.look(NOW + 140, one, works_for={"m-1": "A"})

        assert report(round_.amounts("A")).machine_seconds == pytest.approx(140)

    @pytest.mark.parametrize(
        ("since", "lost"), [(NOW + 80, 20.0), (None, 0.0), (1.0, 100.0), (-1e9, 0.0), ("lies", 0.0)]
    )
    def test_lost_work_is_what_a_killed_worker_had_not_pushed(
        self, stage: Stage, round_: Round, since: object, lost: float
    ) -> None:
        job = stage.jobs.submit(spec(), "0" * 64).id
        beat = {"unpushed_since": since}
        Leases(round_.ledger, job, f"{job}.m-1", 60).renew(beat, [])
        one = machine("m-1")
        round_.look(NOW, one, works_for={"m-1": job}, nodes="m-1")
        round_.look(NOW + 100, one, works_for={"m-1": job}, nodes="m-1")
        round_.look(NOW + 101)

        found = report(round_.amounts(job))
        assert found.lost_work.seconds == pytest.approx(lost)
        assert found.lost_work.usd == pytest.approx(lost / HOUR)


def spec(**fields: Any) -> JobSpec:
    least = {"name": "job", "task": "t:T", "epochs": 2, "subtasks_per_epoch": 3}
    return JobSpec.parse({**least, **fields})


class TestSpeeds:
    def test_the_median_of_those_that_were_measured_long_enough(self, stage: Stage) -> None:
        speeds, job = Speeds(stage.ledger), stage.jobs.submit(spec(), "0" * 64)
        machines = [machine(f"m-{number}") for number in range(4)]

        def beats(at: float, *samples: int) -> dict[str, Heartbeat]:
            return {
                f"{job.id}.m-{number}": Heartbeat(at=at, samples=each, pid=1)
                for number, each in enumerate(samples)
            }

        # the last one tells tales, the one before has only begun
        speeds.look(job, beats(NOW, 10, 10, 0, 10), machines, NOW)
        assert speeds.rates(job) == {}
        later = NOW + MEASURE_SECONDS
        speeds.look(job, beats(later, 110, 210, 10, 10**12), machines, later)

        assert speeds.rates(job) == {("east", "small"): pytest.approx(20.0)}
        assert Workloads(stage.ledger).get("job", "t:T").rates == {
            "east|small": pytest.approx(20.0)
        }
        again = stage.jobs.submit(spec(epochs=5), "0" * 64)
        assert Speeds(stage.ledger).rates(again) == speeds.rates(job)

    @pytest.mark.parametrize(
        "nonsense", [{}, {"at": "x", "samples": 1}, {"at": 1.0, "samples": -1}]
    )
    def test_nonsense_says_nothing(self, stage: Stage, nonsense: dict[str, Any]) -> None:
        speeds, job = Speeds(stage.ledger), stage.jobs.submit(spec(), "0" * 64)
        for at in (NOW, NOW + 100):
            speeds.look(job, {f"{job.id}.m-1": Heartbeat(**nonsense)}, [machine("m-1")], at)
        assert speeds.rates(job) == {}


POOLS = """
pools:
  - {name: inside, provider: local, labels: [eu-only]}
  - {name: outside, provider: local}
"""


class TestGuard:
    @pytest.fixture
    def labelled(self, stage: Stage) -> JobRecord:
        wanted = {"pools": ["outside", "inside"]}
        return stage.jobs.submit(spec(labels=["eu-only"], workers=wanted), "0" * 64)

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "pools.yaml"
        path.write_text(POOLS)
        return path

    def estate(self, stage: Stage, file: Path) -> PoolRegistry:
        return PoolRegistry(Settings(home=stage.home, pools=file))

    def test_pools_fall_out_once_with_an_event(
        self, stage: Stage, labelled: JobRecord, file: Path
    ) -> None:
        estate = self.estate(stage, file)
        for _ in range(2):
            guard = ClearancePolicy(Settings(), stage.ledger)
            guard.know(estate.pools)
            assert guard.divide(labelled) == (("inside",), frozenset({"outside"}))

        (event,) = stage.events(labelled.id, "pool-refused")
        assert event["details"] == {"pool": "outside", "why": "may not see eu-only"}

    def test_a_pool_that_is_edited_counts_from_the_next_look_on(
        self, stage: Stage, labelled: JobRecord, file: Path
    ) -> None:
        estate, guard = self.estate(stage, file), ClearancePolicy(Settings(), stage.ledger)
        guard.know(estate.pools)
        guard.place(labelled.id, worker_name("m-1", labelled.id), "inside")
        clearances, name = Clearances(stage.ledger), f"{labelled.id}.m-1"
        assert not clearances.uncleared(labelled.id, [name])
        assert not estate.refresh(), "nothing was changed"

        file.write_text(POOLS.replace("[eu-only]", "[]"))
        assert estate.refresh()
        guard.know(estate.pools)

        assert guard.divide(labelled) == ((), frozenset({"inside", "outside"}))
        assert clearances.uncleared(labelled.id, [name]) == {name}

    def test_a_file_that_is_broken_changes_nothing(self, stage: Stage, file: Path) -> None:
        estate = self.estate(stage, file)
        file.write_text("pools: nonsense")

        assert not estate.refresh()
        assert list(estate.pools) == ["inside", "outside"]


DEAR = """
pools:
  - {name: east, provider: local, template: {price_per_hour: 3.6, on_demand_price_per_hour: 9}}
"""


class TestDemands:
    """With a heartbeat of a second a machine that is given up costs 27 s more."""

    @pytest.fixture
    def parts(self, stage: Stage, tmp_path: Path) -> ControllerContext:
        file = tmp_path / "pools.yaml"
        file.write_text(DEAR)
        settings = Settings(home=tmp_path / "home", pools=file, heartbeat=1.0)
        parts = ControllerContext.over(settings, stage.ledger, PoolRegistry(settings))
        parts.guard.know(parts.estate.pools)
        return parts

    def job(self, parts: ControllerContext, budget: float) -> JobRecord:
        wanted = spec(stop={"max_cost_usd": budget}, workers={"pools": ["east"]})
        return parts.jobs.submit(wanted, "0" * 64)

    def demand(
        self, parts: ControllerContext, job: JobRecord, now: float, *machines: Instance
    ) -> JobDemand:
        offers = {"east": parts.estate.providers["east"].offers("east")}
        return Demands(parts).of(parts.jobs.get(job.id), machines, offers, now)

    def paying(self, parts: ControllerContext, job: JobRecord) -> Instance:
        """A machine at a tenth of a cent a second."""
        one = machine("m-1", price_per_hour=3.6)
        parts.books.launched([one], [job.id])
        return one

    def test_a_job_goes_on_while_its_budget_lasts(self, parts: ControllerContext) -> None:
        job = self.job(parts, 0.128)
        found = self.demand(parts, job, NOW + 100, self.paying(parts, job))

        assert found.running
        assert found.affordable == pytest.approx(0.001)
        assert Demands(parts).unpaid([parts.jobs.get(job.id)]) == {}

    def test_it_is_paused_before_its_machines_would_cost_more(
        self, parts: ControllerContext
    ) -> None:
        job = self.job(parts, 0.127)
        found = self.demand(parts, job, NOW + 100.1, self.paying(parts, job))

        assert not found.running
        paused = parts.jobs.get(job.id)
        assert paused.state is JobState.PAUSED
        assert paused.reason is not None
        assert paused.reason.startswith("stop.max_cost_usd: 0.1001 of 0.127 USD are spent")
        assert list(Demands(parts).unpaid([paused])) == ["m-1"]

    def test_one_whose_budget_buys_no_machine_does_not_wait_for_ever(
        self, parts: ControllerContext
    ) -> None:
        job = self.job(parts, 0.02)

        assert not self.demand(parts, job, NOW).running
        assert "the least that a machine costs" in (parts.jobs.get(job.id).reason or "")

    def test_who_is_over_keeps_no_machine_warm(self, parts: ControllerContext) -> None:
        job = self.job(parts, 5.0)
        self.paying(parts, job)
        parts.jobs.cancel(job.id)

        assert list(Demands(parts).unpaid([]).values()) == [
            f"{job.id} has a budget and is cancelled"
        ]

    def test_without_a_budget_nothing_is_bounded(self, parts: ControllerContext) -> None:
        job = parts.jobs.submit(spec(workers={"pools": ["east"]}), "0" * 64)
        assert self.demand(parts, job, NOW, self.paying(parts, job)).affordable is None


def test_an_advice_to_leave_is_told_once(stage: Stage) -> None:
    job = stage.jobs.submit(spec(), "0" * 64).id
    chronicle = FleetEvents(Control(stage.ledger), stage.jobs)
    row = FleetRow("east", "running", True, job, NOW, None, "", True, 1.0)
    for advised_at in (None, NOW, NOW):
        chronicle.show({"m-1": replace(row, advised_at=advised_at)}, {})

    (event,) = stage.events(job, "rebalance-advice")
    assert event["details"] == {"instance": "m-1"}


def test_a_machine_that_goes_before_it_joins_is_told_once_and_no_other(stage: Stage) -> None:
    control = Control(stage.ledger)
    chronicle = FleetEvents(control, stage.jobs)
    row = FleetRow("east", "running", False, None, NOW, None, "", True, 1.0)
    chronicle.show(
        {
            "stillborn": row,
            "ended-by-us": row,
            "interrupted": replace(row, state="leaving"),
            "lost": replace(row, was_up=True),
            "there": row,
        },
        {},
    )
    # a new controller has not seen that it was up, and shows it as if it was not
    chronicle = FleetEvents(control, stage.jobs)
    chronicle.show(
        {**{name: FleetRow(**each) for name, each in control.instances().items()}, "lost": row}, {}
    )
    chronicle.ended_by_us("ended-by-us", "idle")

    assert chronicle.never_joined({"there"}) == {"stillborn": row}
    chronicle.show({"there": row}, {})
    assert chronicle.never_joined({"there"}) == {}


def test_a_cache_is_for_one_pool_and_what_it_may_see() -> None:
    before = cache_name("inside", {"eu-only", "confidential"})

    assert before == cache_name("inside", ["confidential", "eu-only"]), "not a new one each time"
    others = {
        cache_name("inside", ()),
        cache_name("inside", ["eu-only"]),
        cache_name("outside", ["confidential", "eu-only"]),
    }
    assert len({before, *others}) == 4
