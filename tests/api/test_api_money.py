"""Costs and plans, over HTTP and on the command line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.api_harness import Api, spec, zipped
from typer.testing import CliRunner

from vcasgd.cli.commands import app
from vcasgd.client import Client
from vcasgd.errors import Conflict, SpecError
from vcasgd.fleet.estimate import WAITS
from vcasgd.schemas.costs import Workload
from vcasgd.store.ledger.costs import Booking, Costs, Workloads
from vcasgd.store.ledger.job import JobState

Run = Callable[..., Result]


def pool(price: float = 1.0, *, provider: str = "aws", **more: Any) -> dict[str, Any]:
    offer = {
        "pool": "east", "zone": "a", "machine_type": "small", "spot": True,
        "price_per_hour": price, "on_demand_price_per_hour": 4 * price, "cpus": 4.0, "gpus": 0,
        "as_of": time.time(), "source": "test",
    }  # fmt: skip
    return {
        "provider": provider, "spot": True, "labels": ["eu-only"], "capacity": 8, "machines": 0,
        "launches": 0, "offers": [offer], "markets": [], **more,
    }  # fmt: skip


EAST = {"workers": {"pools": ["east"], "max": 2}}


@pytest.fixture
def market(api: Api) -> Api:
    api.control.publish({}, {"east": pool()})
    return api


class TestCost:
    def test_cost_sums_booked_amounts(self, api: Api, client: Client) -> None:
        job = api.submit(stop={"max_cost_usd": 5})
        amounts = {
            "east|spot|working|seconds": 3600.0, "east|spot|working|usd": 1.0,
            "east|spot|working|on_demand_usd": 4.0, "east|spot|working|lost_seconds": 36.0,
            "east|spot|working|lost_usd": 0.01, "east|spot|booting|seconds": 360.0,
            "east|spot|booting|usd": 0.1, "east|spot|booting|on_demand_usd": 0.4,
        }  # fmt: skip
        assert Costs(api.connection).book([Booking("m-1", None, "{}", job, amounts)]) == [True]

        found = client.job(job).cost()

        assert found.spent_usd == pytest.approx(1.1)
        assert found.on_demand_usd == pytest.approx(4.4)
        assert found.saved_usd == pytest.approx(3.3)
        assert (found.max_cost_usd, found.machine_seconds) == (5.0, 3960.0)
        assert [each.model_dump() for each in found.pools] == [
            {"pool": "east", "spot": True, "seconds": 3960.0, "usd": pytest.approx(1.1),
             "on_demand_usd": pytest.approx(4.4)}
        ]  # fmt: skip
        assert found.wasted.model_dump() == {
            "booting": {"seconds": 360.0, "usd": 0.1},
            "idle": {"seconds": 0.0, "usd": 0.0},
            "lost_work": {"seconds": 36.0, "usd": 0.01},
        }


class TestPlan:
    def test_plan_uses_measurements_of_earlier_jobs(self, market: Api, client: Client) -> None:
        known = Workload(3600, {"east|small": 10.0}, 20, 1000.0)
        Workloads(market.connection).set({("digits", "train:Digits"): known})

        found = client.plan(spec(**EAST))
        given = client.plan(spec(push_every=10, **EAST), parameters=10**6).traffic

        assert found.machines == 2
        assert found.hours == pytest.approx(2 * 3600 / 20 / 3600)
        assert found.cost_usd == pytest.approx(0.2)
        assert found.costs_money
        (offer,) = found.offers
        assert (offer.machines, offer.samples_per_second) == (2, 10.0)
        assert found.traffic.total_bytes == pytest.approx(2 * 3600 * 1000)
        assert given.total_bytes == pytest.approx(2 * 3600 / 200 * 8e6)
        assert market.jobs.all() == [], "nothing is submitted"

    def test_plan_waits_for_busy_machines(self, api: Api, client: Client) -> None:
        full = {"capacity": 2, "machines": 2}
        api.control.publish({}, {"east": pool(**full)})
        later = client.plan(spec(**EAST))
        api.control.publish({}, {"east": pool(**full, idle=2)})
        now = client.plan(spec(**EAST))

        assert (later.machines, now.machines) == (2, 2)
        assert WAITS in later.assumptions
        assert WAITS not in now.assumptions

    def test_unknown_prices_count_as_costs(self, api: Api, client: Client) -> None:
        api.control.publish({}, {"east": pool(offers=None)})
        assert client.plan(spec(**EAST)).costs_money

    def test_plan_and_submission_judge_a_deadline(self, market: Api, client: Client) -> None:
        known = Workload(samples=72_000, rates={"east|small": 10.0})
        Workloads(market.connection).set({("digits", "train:Digits"): known})
        # an hour of two machines, for each of two epochs
        fields = {"epochs": 2, **EAST}

        plan = client.plan(spec(**fields, within="6h"))

        assert (plan.deadline.in_time, plan.deadline.at > time.time()) == (1.0, True)
        assert plan.cost_usd < (plan.deadline.cost_usd or 0) < (plan.on_demand_cost_usd or 0)
        assert client.plan(spec(**fields)).deadline is None
        impossible = spec(**fields, within="90m")
        package = zipped()
        for ask in (client.plan, lambda job: client.submit(job, package)):
            with pytest.raises(SpecError, match="within: the job takes about 2 h 5 min with 2"):
                ask(impossible)
            with pytest.raises(SpecError, match=r"finish_by: .* has passed"):
                ask(spec(**fields, finish_by="2020-01-01T00:00Z"))

    def test_plan_requires_a_controller(self, client: Client) -> None:
        with pytest.raises(Conflict, match="no controller has reported"):
            client.plan(spec())


class TestBudget:
    def test_paused_job_resumes_with_a_larger_budget(self, api: Api, client: Client) -> None:
        job = api.submit(stop={"max_cost_usd": 1})
        api.start_job(job)
        assert api.jobs.transition(job, JobState.PAUSED, [JobState.RUNNING], why="spent")

        view = client.job(job).resume(max_cost_usd=2.5)

        assert (view.state, view.spec.stop.max_cost_usd) == ("running", 2.5)
        assert client.job(job).cost().max_cost_usd == 2.5

    def test_a_job_that_runs_with_another_budget_is_refused(self, api: Api, client: Client) -> None:
        api.start_job(job := api.submit(stop={"max_cost_usd": 9}))

        with pytest.raises(Conflict, match="is running, so its budget stays"):
            client.job(job).resume(max_cost_usd=2)

        assert client.job(job).resume(max_cost_usd=9).state == "running", "a repeated request"


class TestLabels:
    def test_job_without_a_pool_for_its_labels_is_refused(
        self, market: Api, client: Client
    ) -> None:
        with pytest.raises(SpecError, match="none of the pools east may see all of") as caught:
            client.submit(spec(**EAST, labels=["eu-only", "secret"]), zipped())
        assert caught.value.field == "labels"

    def test_job_without_a_pool_for_its_resources_is_refused(
        self, market: Api, client: Client
    ) -> None:
        with pytest.raises(SpecError, match="pool east has 4 CPUs, no GPU") as caught:
            client.submit(spec(**EAST, resources={"gpus": 1, "gpu_memory": "24GB"}), zipped())
        assert caught.value.field == "resources.gpus"
        assert client.submit(spec(**EAST, resources={"cpus": 4}), zipped()).state == "starting"


@pytest.fixture
def run(market: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("VCASGD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("VCASGD_API_URL", market.url)
    monkeypatch.setenv("VCASGD_TOKEN", market.token)

    def run(*words: object, answer: str | None = None) -> Result:
        if answer is not None:
            monkeypatch.setattr("vcasgd.cli.money.stdin_is_a_terminal", lambda: True)
        return CliRunner().invoke(app, [str(word) for word in words], input=answer)

    return run


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("class Digits: ...\n")
    (folder / "job.yaml").write_text(json.dumps(
        {"name": "digits", "task": "train:Digits", "epochs": 2, "subtasks_per_epoch": 5, **EAST}
    ))  # fmt: skip
    return folder / "job.yaml"


def test_plan_is_shown_as_text(run: Run, job_file: Path) -> None:
    shown = run("plan", job_file, "--samples", 3600, "--samples-per-second", 10)

    assert shown.exit_code == 0, shown.output
    assert "2 machines for 2.0000 USD/h (8.0000 on demand)" in shown.stdout
    assert "about 6 min and 0.20 USD (0.80 on demand)" in shown.stdout
    assert "assumed: each trains 10 samples/s, as given" in shown.stdout


def test_cost_is_shown_as_text(run: Run, market: Api) -> None:
    job = market.submit(stop={"max_cost_usd": 5})
    amounts = {"east|spot|idle|seconds": 360.0, "east|spot|idle|usd": 0.1,
               "east|spot|idle|on_demand_usd": 0.4}  # fmt: skip
    Costs(market.connection).book([Booking("m-1", None, "{}", job, amounts)])

    shown = run("cost", job)

    assert shown.exit_code == 0, shown.output
    for line in ("spent       0.1000 USD of 5", "saved       0.3000 USD (75%)",
                 "idle        0.1000 USD, 6 min"):  # fmt: skip
        assert line in shown.stdout
    assert json.loads(run("cost", job, "--json").stdout)["job"] == job


def test_paid_job_is_not_submitted_without_confirmation(
    run: Run, market: Api, job_file: Path
) -> None:
    refused = run("submit", job_file)

    assert refused.exit_code == 1
    assert "the job costs money, and stdin is not a terminal" in refused.stderr
    assert "--yes" in refused.stderr
    assert market.jobs.all() == []
    assert run("submit", job_file, "--yes").exit_code == 0
    assert len(market.jobs.all()) == 1


def test_a_paid_job_is_not_extended_without_confirmation(
    run: Run, market: Api, client: Client
) -> None:
    job = client.submit(spec(**EAST), zipped()).id
    market.start_job(job)
    name, _ = market.store_checkpoint(job, 1)
    market.finish(job, model=name)

    refused = run("extend", job, "--epochs", "+5")

    assert refused.exit_code == 1
    assert "the job costs money, and stdin is not a terminal" in refused.stderr
    assert len(market.jobs.all()) == 1
    assert run("extend", job, "--epochs", "+5", "--yes").exit_code == 0
    assert len(market.jobs.all()) == 2


@pytest.mark.parametrize(("answer", "jobs"), [("n\n", 0), ("y\n", 1)])
def test_submit_asks_for_confirmation(
    run: Run, market: Api, job_file: Path, answer: str, jobs: int
) -> None:
    asked = run("submit", job_file, answer=answer)

    assert "2 machines for 2.0000 USD/h" in asked.stderr
    assert len(market.jobs.all()) == jobs
    assert (asked.exit_code == 0) is bool(jobs)


def test_submit_says_how_sure_the_deadline_of_a_local_job_is(
    run: Run, market: Api, job_file: Path
) -> None:
    market.control.publish({}, {"local": pool(provider="local", labels=[])})
    known = Workload(samples=72_000, rates={"east|small": 10.0})
    Workloads(market.connection).set({("digits", "train:Digits"): known})

    submitted = run("submit", job_file, "--set", "workers.pools=[local]", "--within", "12h")

    assert submitted.exit_code == 0, submitted.output
    assert submitted.stderr.startswith("deadline in "), submitted.stderr


def test_job_with_unknown_costs_needs_confirmation(run: Run, market: Api, job_file: Path) -> None:
    market.control.publish({}, {})
    refused = run("submit", job_file)

    assert refused.exit_code == 1
    assert "the cost of the job is unknown" in refused.stderr
