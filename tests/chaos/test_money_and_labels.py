"""Budgets and labels on a whole stack: machines are bought, released, and bought elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vcasgd.chaos.audited_job import counting_spec
from vcasgd.client import Client
from vcasgd.schemas.jobs import JobView
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState, running

pytestmark = pytest.mark.slow

Eventually = Callable[..., Any]
HEARTBEAT = 1.0
#: Seconds of a local step while a job is slowed down.
HELD_SECONDS = 0.5
#: One cent per second, so that the budget runs out during the test.
DEAR = "{price_per_hour: 36, on_demand_price_per_hour: 144}"
POOLS = f"""
pools:
  - {{name: outside, provider: local, max_machines: 2}}
  - {{name: inside, provider: local, max_machines: 2, labels: [eu-only]}}
  - {{name: spare, provider: local, max_machines: 2, labels: [eu-only]}}
  - {{name: dear, provider: local, max_machines: 2, template: {DEAR}}}
"""


class Fleet:
    """A stack with several pools."""

    def __init__(self, home: Path, file: Path, client: Client) -> None:
        self.home = home
        self.hold = home.with_name("hold")
        self.file = file
        self.client = client

    def spec(self, *pools: str, epochs: int, **fields: Any) -> JobSpec:
        spec = counting_spec(epochs, self.hold).model_dump(mode="json")
        spec["args"]["step_seconds"] = HELD_SECONDS
        spec["workers"] = {"min": 1, "max": 2, "pools": list(pools)}
        return JobSpec.parse({**spec, **fields})

    def submit(self, *pools: str, epochs: int, **fields: Any) -> str:
        """Submit a job that runs slowly until :meth:`finish`."""
        self.hold.touch()
        return self.client.submit_directory(self.spec(*pools, epochs=epochs, **fields)).id

    def training_machines(self, job: str) -> set[str]:
        """Return the pools in which the job trains now."""
        pool_of = {row.id: row.pool for row in self.client.machines()}
        fresh = time.time() - 4 * HEARTBEAT
        return {
            pool_of.get(row.machine, "gone")
            for row in self.client.job(job).workers()
            if (row.at or 0.0) > fresh and row.steps
        }

    def of_pool(self, pool: str) -> list[str]:
        return [row.id for row in self.client.machines() if row.pool == pool]

    def events(self, job: str, kind: str) -> list[dict[str, Any]]:
        return [event.details for event in self.client.job(job).events() if event.kind == kind]

    def finish(self, job: str, folder: Path) -> JobView:
        """Let the job end. Its model must count every sample exactly once in each epoch."""
        self.hold.unlink()
        view = self.client.job(job).wait(300)
        assert view.state == "succeeded", view.reason
        counts = load_file(self.client.job(job).download(folder / "model.safetensors"))["count"]
        assert torch.equal(counts, torch.full_like(counts, view.progress.epochs))
        return view


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    file = folder / "pools.yaml"
    file.write_text(POOLS)
    settings = Settings(
        home=folder / "home", api_port=0, heartbeat=HEARTBEAT, idle_seconds=5.0, pools=file
    )
    with running(settings):
        home = StackHome(settings.home_path)
        client = Client(StackState.read(home.path).api_url, home.token() or "")
        with client:
            yield Fleet(home.path, file, client)


@pytest.mark.extended
def test_labeled_data_stays_in_allowed_pools_after_a_pool_is_edited(
    fleet: Fleet, eventually: Eventually, tmp_path: Path
) -> None:
    job = fleet.submit("outside", "inside", "spare", epochs=3, data={"labels": ["eu-only"]})
    eventually(lambda: fleet.training_machines(job) == {"inside"})
    held = set(fleet.of_pool("inside"))
    assert fleet.events(job, "pool-refused") == [{"pool": "outside", "why": "may not see eu-only"}]

    # When the pool in which it trains loses the clearance for the data
    fleet.file.write_text(POOLS.replace("labels: [eu-only]", "labels: []", 1))

    eventually(lambda: not held & set(fleet.of_pool("inside")))
    eventually(lambda: fleet.training_machines(job) == {"spare"})
    assert {"pool": "inside", "why": "may not see eu-only"} in fleet.events(job, "pool-refused")
    fleet.finish(job, tmp_path)
    assert not fleet.of_pool("outside"), "no machine was ever bought there for it"
    assert not (fleet.home / "cache" / "outside").exists(), "and none of its data is cached there"


@pytest.mark.ci
def test_budget_pauses_the_job_before_it_is_spent(
    fleet: Fleet, eventually: Eventually, tmp_path: Path
) -> None:
    budget, stop = 0.8, {"stop": {"max_cost_usd": 0.8}}
    plan = fleet.client.plan(
        fleet.spec("dear", epochs=5, **stop), samples=3600, samples_per_second=1.0
    )
    assert (plan.machines, plan.usd_per_hour, plan.hours) == (2, 72.0, 2.5)
    job = fleet.submit("dear", epochs=5, **stop)

    eventually(lambda: fleet.client.job(job).state == "paused")

    view = fleet.client.job(job)
    assert view.reason is not None
    assert view.reason.startswith("stop.max_cost_usd: ")
    eventually(lambda: not fleet.of_pool("dear"))
    cost = fleet.client.job(job).cost()
    assert 0 < cost.spent_usd < budget
    assert cost.on_demand_usd == pytest.approx(4 * cost.spent_usd)
    assert cost.wasted.booting.seconds > 0

    # When its budget is raised
    resumed = fleet.client.job(job).resume(max_cost_usd=100.0)
    # On a busy computer the first snapshot may not exist yet.
    assert resumed.state == ("running" if view.started_at else "starting")

    eventually(lambda: budget < fleet.client.job(job).cost().spent_usd < 100.0)
    fleet.finish(job, tmp_path)
    eventually(lambda: not fleet.of_pool("dear"))
