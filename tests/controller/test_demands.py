"""Budgets, speeds, labels, and pools: what decides which machines a job can get."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fleet_records import NOW, PACKAGE, events_of, job_spec, machine

from vcasgd.controller.fleet.costs import MEASURE_SECONDS, CostLedger, Speeds
from vcasgd.controller.fleet.demands import ClearancePolicy, Demands, owner_limits
from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.fleet.observed import JobDemand, Limits
from vcasgd.fleet.pools import cache_name
from vcasgd.schemas.costs import Workload
from vcasgd.schemas.fleet import Machine
from vcasgd.settings import Settings
from vcasgd.spec.access import Scope
from vcasgd.spec.job import JobState
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import WORKLOADS
from vcasgd.store.ledger.api_tokens import ApiTokens
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.costs import Workloads
from vcasgd.store.ledger.job import JobRecord, ModelFacts
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.placement import Clearances
from vcasgd.store.ledger.untrusted import Heartbeat
from vcasgd.worker_names import worker_name


class TestSpeeds:
    def test_speed_is_the_median_of_machines_measured_long_enough(
        self, ledger: RedisClient, jobs: Jobs
    ) -> None:
        speeds, job = Speeds(ledger), jobs.submit(job_spec(), PACKAGE)
        machines = {f"m-{number}": machine(f"m-{number}") for number in range(4)}

        def beats(at: float, *samples: int) -> dict[str, Heartbeat]:
            return {
                f"{job.id}.m-{number}": Heartbeat(at=at, samples=each, pid=1)
                for number, each in enumerate(samples)
            }

        # The last machine reports false numbers, and the previous one has only started.
        speeds.measure(job, beats(NOW, 10, 10, 0, 10), machines, NOW)
        assert speeds.workload(job).speeds == {}
        later = NOW + MEASURE_SECONDS
        speeds.measure(job, beats(later, 110, 210, 10, 10**12), machines, later)

        assert speeds.workload(job).speeds == {("east", "small"): pytest.approx(20.0)}
        speeds.write()
        assert Workloads(ledger).get("job", "t:T").rates == {"east|small": pytest.approx(20.0)}
        again = jobs.submit(job_spec(epochs=5), PACKAGE)
        assert Speeds(ledger).workload(again).speeds == speeds.workload(job).speeds

    def test_a_short_job_is_measured_by_its_first_steps(
        self, ledger: RedisClient, jobs: Jobs
    ) -> None:
        spec = job_spec(epochs=10)
        speeds, job = Speeds(ledger), jobs.submit(spec, PACKAGE)
        machines = {name: machine(name) for name in ("m-1", "m-2")}
        facts = ModelFacts(samples=1000, validation_samples=1, layout="", order_digest="", shards=1)
        started = replace(job, facts=facts)
        steps = {"at": NOW, "pid": 1, "samples": 640, "steps": 10, "resident_bytes": 410_000_000}
        beats = {
            f"{job.id}.m-1": Heartbeat(**steps, step_seconds=0.64),
            f"{job.id}.m-2": Heartbeat(**steps, samples_per_second=100.0),
        }

        speeds.measure(started, {}, machines, NOW)
        assert speeds.estimate(started, {}) is None
        speeds.measure(started, beats, machines, NOW + 1)

        assert speeds.workload(job).speeds == {("east", "small"): 100.0}
        assert speeds.estimate(started, beats) == (
            "10 epochs take about 50 s at 200 samples/s, the speed of the first steps of 2 "
            "workers; each needs about 0.41 GB of memory"
        )
        assert speeds.estimate(started, beats) is None, "once"
        speeds.write()
        known = Workloads(ledger).get("job", "t:T")
        assert (known.rates, known.memory_bytes) == ({"east|small": 100.0}, 410_000_000)

        later = NOW + 1 + MEASURE_SECONDS
        slow = {"at": later, "pid": 1, "samples": 1140, "steps": 20, "samples_per_second": 1.0}
        speeds.measure(started, {f"{job.id}.m-2": Heartbeat(**slow)}, machines, later)
        assert speeds.workload(job).speeds != {("east", "small"): 1.0}, (
            "later steps count as they are measured"
        )

    def test_the_time_from_launch_to_first_samples_is_kept_for_the_next_plan(
        self, ledger: RedisClient, jobs: Jobs
    ) -> None:
        speeds, job = Speeds(ledger), jobs.submit(job_spec(), PACKAGE)
        began = job.created_at
        # The last one was there before the job.
        machines = {
            f"m-{number}": machine(f"m-{number}", launched_at=began + age)
            for number, age in enumerate((1.0, 2.0, 3.0, -500.0))
        }
        beats = {
            f"{job.id}.{name}": Heartbeat(at=began + 42.0, samples=16, pid=1) for name in machines
        }

        speeds.measure(job, beats, machines, began + 42.0)
        later = {name: beat.model_copy(update={"at": began + 99.0}) for name, beat in beats.items()}
        speeds.measure(job, later, machines, began + 99.0)
        speeds.write()

        assert Workloads(ledger).get("job", "t:T").start_seconds == pytest.approx(40.0)

    def test_traffic_of_a_sample_is_kept_for_the_next_plan(
        self, ledger: RedisClient, jobs: Jobs
    ) -> None:
        speeds, job = Speeds(ledger), jobs.submit(job_spec(), PACKAGE)
        moved = {"pushed_bytes": 300, "fetched_bytes": 500}
        beats = {
            f"{job.id}.m-1": Heartbeat(at=NOW, samples=10, pid=1, **moved),
            # one that has not pushed, and one of an older version
            f"{job.id}.m-2": Heartbeat(at=NOW, samples=10, pid=1, pushed_bytes=0, fetched_bytes=9),
            f"{job.id}.m-3": Heartbeat(at=NOW, samples=10, pid=1, pushed_bytes=7),
        }

        speeds.measure(job, beats, {}, NOW)
        speeds.write()
        assert Workloads(ledger).get("job", "t:T").bytes_per_sample == 80.0

        speeds.measure(job, {}, {}, NOW + 100)
        speeds.write()
        assert Workloads(ledger).get("job", "t:T").bytes_per_sample == 80.0

    def test_speeds_of_all_jobs_are_written_in_one_request(
        self, ledger: RedisClient, jobs: Jobs
    ) -> None:
        speeds = Speeds(ledger)
        for number in range(20):
            job = jobs.submit(job_spec(name=f"job{number}"), PACKAGE)
            for at, samples in ((NOW, 10), (NOW + MEASURE_SECONDS, 110)):
                beat = Heartbeat(at=at, samples=samples, pid=1)
                speeds.measure(job, {f"{job.id}.m-1": beat}, {"m-1": machine("m-1")}, at)
        before = ledger.info("stats")["total_commands_processed"]

        for _ in range(3):
            speeds.write()

        assert ledger.info("stats")["total_commands_processed"] - before == 2
        assert Workloads(ledger).get("job19", "t:T").rates == {"east|small": pytest.approx(10.0)}

    @pytest.mark.parametrize(
        "nonsense", [{}, {"at": "x", "samples": 1}, {"at": 1.0, "samples": -1}]
    )
    def test_invalid_heartbeats_are_ignored(
        self, ledger: RedisClient, jobs: Jobs, nonsense: dict[str, Any]
    ) -> None:
        speeds, job = Speeds(ledger), jobs.submit(job_spec(), PACKAGE)
        for at in (NOW, NOW + 100):
            speeds.measure(
                job, {f"{job.id}.m-1": Heartbeat(**nonsense)}, {"m-1": machine("m-1")}, at
            )
        assert speeds.workload(job).speeds == {}


LABELLED_POOLS = """
pools:
  - {name: inside, provider: local, labels: [eu-only]}
  - {name: outside, provider: local}
"""


class TestClearance:
    @pytest.fixture
    def labelled(self, jobs: Jobs) -> JobRecord:
        workers = {"pools": ["outside", "inside"]}
        return jobs.submit(job_spec(labels=["eu-only"], workers=workers), PACKAGE)

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "pools.yaml"
        path.write_text(LABELLED_POOLS)
        return path

    @pytest.fixture
    def pools(self, tmp_path: Path, file: Path, ledger: RedisClient) -> PoolRegistry:
        return PoolRegistry(Settings(home=tmp_path, pools=file), Control(ledger))

    def test_pool_without_the_label_is_refused_with_one_event(
        self, ledger: RedisClient, jobs: Jobs, labelled: JobRecord, pools: PoolRegistry
    ) -> None:
        for _ in range(2):
            clearance = ClearancePolicy(Settings(), ledger)
            clearance.set_pools(pools.specs)
            assert clearance.divide(labelled) == (("inside",), frozenset({"outside"}))

        (event,) = events_of(jobs, labelled.id, "pool-refused")
        assert event["details"] == {"pool": "outside", "why": "may not see eu-only"}

    def test_edited_pool_takes_effect_in_the_next_round(
        self, ledger: RedisClient, labelled: JobRecord, pools: PoolRegistry, file: Path
    ) -> None:
        clearance = ClearancePolicy(Settings(), ledger)
        clearance.set_pools(pools.specs)
        clearance.place({labelled.id: {worker_name("m-1", labelled.id): "inside"}})
        clearances, name = Clearances(ledger), f"{labelled.id}.m-1"
        assert not clearances.uncleared(labelled.id, [name])
        assert not pools.refresh(), "the file is the same"

        file.write_text(LABELLED_POOLS.replace("[eu-only]", "[]"))
        assert pools.refresh()
        clearance.set_pools(pools.specs)

        assert clearance.divide(labelled) == ((), frozenset({"inside", "outside"}))
        assert clearances.uncleared(labelled.id, [name]) == {name}

    def test_invalid_pools_file_changes_nothing(self, pools: PoolRegistry, file: Path) -> None:
        file.write_text("pools: nonsense")

        assert not pools.refresh()
        assert list(pools.specs) == ["inside", "outside"]

    def test_cache_belongs_to_one_pool_and_its_labels(self) -> None:
        name = cache_name("inside", {"eu-only", "confidential"})

        assert name == cache_name("inside", ["confidential", "eu-only"]), "the order has no effect"
        others = {
            cache_name("inside", ()),
            cache_name("inside", ["eu-only"]),
            cache_name("outside", ["confidential", "eu-only"]),
        }
        assert len({name, *others}) == 4


EXPENSIVE_POOL = """
pools:
  - {name: east, provider: local, template: {price_per_hour: 3.6, on_demand_price_per_hour: 9}}
"""
#: A machine that is given up costs 27 more seconds.
LIMITS = Limits(exit_seconds=27.0, billing_seconds=0.0)


class Budgets:
    """Demands of jobs on a pool whose machines cost a tenth of a cent per second."""

    def __init__(self, home: Path, ledger: RedisClient) -> None:
        file = home / "pools.yaml"
        file.write_text(EXPENSIVE_POOL)
        settings = Settings(home=home, pools=file)
        pools = PoolRegistry(settings, Control(ledger))
        clearance = ClearancePolicy(settings, ledger)
        clearance.set_pools(pools.specs)
        self.offers = {"east": pools.providers["east"].offers("east")}
        self.jobs, self.costs = Jobs(ledger), CostLedger(ledger)
        self.speeds = Speeds(ledger)
        self.demands = Demands(self.jobs, self.costs, clearance, self.speeds)

    @property
    def remembered(self) -> str:
        """Return the state of the demands and the speeds as text."""
        return f"{vars(self.demands)} {vars(self.speeds)}"

    def submit(self, budget: float | None) -> JobRecord:
        stop = {} if budget is None else {"max_cost_usd": budget}
        return self.jobs.submit(job_spec(stop=stop, workers={"pools": ["east"]}), PACKAGE)

    def machine_of(self, job: JobRecord) -> Machine:
        one = machine("m-1", price_per_hour=3.6)
        self.costs.launched([one], [job.id])
        return one

    def demand(self, job: JobRecord, now: float, *machines: Machine) -> JobDemand:
        return self.demands.of(
            self.jobs.get(job.id), machines, self.offers, LIMITS, now, self.jobs.work(job.id)
        )


def test_demand_has_the_present_priority_and_weight(ledger: RedisClient, tmp_path: Path) -> None:
    one = Budgets(tmp_path, ledger)
    job = one.submit(None)
    demand = one.demand(job, NOW)
    assert (demand.priority, demand.weight) == (0, 1.0)
    one.jobs.change(job.id, {"priority": "low", "weight": 0.5})
    demand = one.demand(job, NOW)
    assert (demand.priority, demand.weight) == (-1, 0.5)


class TestBudget:
    @pytest.fixture
    def budgets(self, ledger: RedisClient, tmp_path: Path) -> Budgets:
        return Budgets(tmp_path, ledger)

    def test_job_runs_while_its_budget_lasts(self, budgets: Budgets) -> None:
        job = budgets.submit(0.128)
        demand = budgets.demand(job, NOW + 100, budgets.machine_of(job))

        assert demand.running
        assert demand.affordable == pytest.approx(0.001)
        assert budgets.demands.unpaid([budgets.jobs.get(job.id)]) == {}

    def test_job_is_paused_before_its_machines_cost_more(self, budgets: Budgets) -> None:
        job = budgets.submit(0.127)
        demand = budgets.demand(job, NOW + 100.1, budgets.machine_of(job))

        assert not demand.running
        paused = budgets.jobs.get(job.id)
        assert paused.state is JobState.PAUSED
        assert paused.reason is not None
        assert paused.reason.startswith("stop.max_cost_usd: 0.1001 of 0.127 USD are spent")
        assert list(budgets.demands.unpaid([paused])) == ["m-1"]

    def test_job_whose_budget_buys_no_machine_is_paused(self, budgets: Budgets) -> None:
        job = budgets.submit(0.02)

        assert not budgets.demand(job, NOW).running
        assert "the least that a machine costs" in (budgets.jobs.get(job.id).reason or "")

    def test_machines_of_an_ended_job_are_unpaid(self, budgets: Budgets) -> None:
        job = budgets.submit(5.0)
        budgets.machine_of(job)
        budgets.jobs.cancel(job.id)

        reasons = list(budgets.demands.unpaid([]).values())
        assert reasons == [f"{job.id} has a budget and is cancelled"]


class TestMonthlyBudgets:
    @pytest.mark.parametrize(
        ("cluster", "user", "field"),
        [
            (0.127, None, "VCASGD_MONTHLY_BUDGET_USD: 0.1001 of 0.127 USD are spent"),
            (None, 0.127, "max_usd_per_month of ann: 0.1001 of 0.127 USD are spent"),
            (0.128, 0.128, None),
            (None, None, None),
        ],
    )
    def test_jobs_are_paused_before_the_month_costs_more(
        self, ledger: RedisClient, tmp_path: Path, cluster: float | None, user: float | None,
        field: str | None,
    ) -> None:  # fmt: skip
        budgets, tokens = Budgets(tmp_path, ledger), ApiTokens(ledger)
        tokens.create("ann", Scope.SUBMIT, max_usd_per_month=user)
        spec = job_spec(workers={"pools": ["east"]})
        job = budgets.jobs.submit(spec, PACKAGE, owner="ann")
        one, now = budgets.machine_of(job), NOW + 100.1

        budgets.demands.set_months([job], {job.id: [one]}, cluster, tokens.all(), LIMITS, now)
        demand = budgets.demand(job, now, one)

        assert demand.running is (field is None)
        assert (budgets.jobs.get(job.id).reason or "").startswith(field or "")
        paused = [budgets.jobs.get(job.id)]
        assert list(budgets.demands.unpaid(paused)) == ["m-1"] * (field is not None)
        assert (demand.affordable is None) is (cluster is None and user is None)

    def test_machines_of_a_users_ended_job_count(self, ledger: RedisClient, tmp_path: Path) -> None:
        # Given a user whose job has ended, and whose machine has not yet
        budgets, tokens = Budgets(tmp_path, ledger), ApiTokens(ledger)
        tokens.create("ann", Scope.SUBMIT, max_usd_per_month=0.127)
        spec = job_spec(workers={"pools": ["east"]})
        over, job = (budgets.jobs.submit(spec, PACKAGE, owner="ann") for _ in range(2))
        one, now = budgets.machine_of(over), NOW + 100
        budgets.jobs.cancel(over.id)

        # Then another job of the user can only spend what that machine leaves
        own = {over.id: [one], job.id: []}
        budgets.demands.set_months([job], own, None, tokens.all(), LIMITS, now)
        assert budgets.demand(job, now).affordable == pytest.approx(0.0)


class TestDeadline:
    @pytest.fixture
    def budgets(self, ledger: RedisClient, tmp_path: Path) -> Budgets:
        known = Workload(samples=36_000, rates={"east|small": 10.0})
        Workloads(ledger).set({("job", "t:T"): known})
        return Budgets(tmp_path, ledger)

    def job(self, budgets: Budgets, **deadline: Any) -> JobRecord:
        # 36,000 samples, of which each of two machines trains 10 in a second: half an hour
        spec = job_spec(epochs=1, workers={"pools": ["east"], "max": 2}, **deadline)
        return budgets.jobs.submit(spec, PACKAGE)

    def test_places_are_filled_on_demand_when_the_slack_is_gone(self, budgets: Budgets) -> None:
        job = self.job(budgets, within="1h")
        started = job.created_at

        early = budgets.demand(job, started + 1)
        assert (early.minimum, early.fallback_after) == (1, math.inf)
        assert "waits for spot machines" in (budgets.jobs.get(job.id).outlook or "")
        later = budgets.demand(job, started + 1100)
        assert (later.minimum, later.fallback_after) == (2, 0.0)
        last = budgets.demand(job, started + 1450, machine("m-1", started))
        assert (last.on_demand_minimum, last.fallback_after) == (1, 0.0)
        assert "bought on demand: none of slack" in (budgets.jobs.get(job.id).outlook or "")
        late = budgets.demand(job, started + 3000)
        assert late.outlook is not None
        assert late.outlook.too_late > 0

        events = [event["text"] for event in events_of(budgets.jobs, job.id, "deadline")]
        assert len(events) == 3, events
        assert "after its deadline" in events[-1]

    def test_jobs_that_ended_are_forgotten(self, budgets: Budgets) -> None:
        # Given a cancelled job with an outlook, a speed, and a machine
        job = self.job(budgets, within="1h", stop={"max_cost_usd": 9.0})
        now = job.created_at + 1
        budgets.demand(job, now, budgets.machine_of(job))
        budgets.jobs.cancel(job.id)
        assert list(budgets.demands.unpaid([])) == ["m-1"]

        # When its machine has ended
        budgets.costs.record([], joined=(), works_for={}, unlisted=(), billing_seconds=0.0, now=now)
        assert job.id in budgets.remembered
        assert budgets.demands.unpaid(budgets.demands.active_jobs(["east"])) == {}

        # Then nothing of it is left
        assert job.id not in budgets.remembered

    def test_job_without_a_deadline_has_no_outlook(self, budgets: Budgets) -> None:
        job = self.job(budgets)

        demand = budgets.demand(job, NOW)
        assert (demand.saves, demand.outlook, demand.fallback_after) == (False, None, None)
        assert budgets.jobs.get(job.id).outlook is None

    def test_speed_that_is_unknown_gets_measured_on_demand(self, budgets: Budgets) -> None:
        spec = job_spec(name="new", workers={"pools": ["east"]}, within="1h")
        demand = budgets.demand(budgets.jobs.submit(spec, PACKAGE), NOW)
        assert (demand.minimum, demand.fallback_after) == (1, 300.0)


class TestActiveJobs:
    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"workers": {"pools": ["west"]}}, "workers.pools: there is no pool west; known: east"),
            (
                {"workers": {"pools": ["east"]}, "labels": ["eu-only"]},
                "workers.pools: none of east may see data labelled eu-only",
            ),
        ],
    )
    def test_job_that_no_pool_can_serve_fails(
        self, ledger: RedisClient, tmp_path: Path, fields: dict[str, Any], reason: str
    ) -> None:
        budgets = Budgets(tmp_path, ledger)
        job = budgets.jobs.submit(job_spec(**fields), PACKAGE)

        assert [each.id for each in budgets.demands.active_jobs(["east"])] == [job.id]

        failed = budgets.jobs.get(job.id)
        assert (failed.state, failed.reason) == (JobState.FAILED, reason)
        assert budgets.demands.active_jobs(["east"]) == []


class TestLimits:
    def test_a_token_limits_its_users_jobs_also_after_it_was_revoked(
        self, ledger: RedisClient, jobs: Jobs
    ) -> None:
        tokens = ApiTokens(ledger)
        ann, _ = tokens.create("ann", Scope.SUBMIT, max_machines=3)
        tokens.create("bob", Scope.SUBMIT)
        submitted = [
            jobs.submit(job_spec(), PACKAGE, owner=owner, owner_limit=limit)
            for owner, limit in (("ann", 5), ("ann", 4), ("bob", None), (None, None))
        ]

        assert owner_limits(submitted, tokens.all()) == {"ann": ann.max_machines}
        tokens.revoke("ann")
        assert owner_limits(submitted, tokens.all()) == {"ann": 4}
        tokens.create("ann", Scope.SUBMIT)
        assert owner_limits(submitted, tokens.all()) == {}


def test_the_ledger_keeps_a_bounded_number_of_workloads(
    ledger: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vcasgd.store.ledger.costs.MAX_WORKLOADS", 100)
    workloads = Workloads(ledger)
    workloads.set({(f"job-{number}", "t:T"): Workload(samples=1) for number in range(300)})
    workloads.trim()
    assert ledger.hlen(WORKLOADS) == 100
    workloads.trim()
    assert ledger.hlen(WORKLOADS) == 100
