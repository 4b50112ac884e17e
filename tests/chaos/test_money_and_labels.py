"""Budgets and labels on a whole stack: machines are bought, released, and bought elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.counted_job import HELD_SECONDS, CountedJob, client_of, held_spec
from support.waiting import await_truth

from vcasgd.client import Client
from vcasgd.settings import Settings

pytestmark = pytest.mark.slow

HEARTBEAT = 1.0
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
    def __init__(self, folder: Path, client: Client) -> None:
        self.home, self.file = folder / "home", folder / "pools.yaml"
        self.client = client

    def submit(self, folder: Path, *pools: str, epochs: int, **fields: Any) -> CountedJob:
        """Submit a job that runs slowly until its end is wanted."""
        workers = {"min": 1, "max": 2, "pools": list(pools)}
        return CountedJob(
            self.client, folder, epochs, step_seconds=HELD_SECONDS, workers=workers, **fields
        )

    def training_machines(self, job: CountedJob) -> set[str]:
        pool_of = {row.id: row.pool for row in self.client.machines()}
        fresh = time.time() - 4 * HEARTBEAT
        return {
            pool_of.get(row.machine, "gone")
            for row in self.client.job(job.id).workers()
            if (row.at or 0.0) > fresh and row.steps
        }

    def of_pool(self, pool: str) -> list[str]:
        return [row.id for row in self.client.machines() if row.pool == pool]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    (file := folder / "pools.yaml").write_text(POOLS)
    settings = Settings(
        home=folder / "home", api_port=0, heartbeat=HEARTBEAT, idle_seconds=5.0, pools=file
    )
    with client_of(settings) as client:
        yield Fleet(folder, client)


@pytest.mark.extended
def test_labeled_data_stays_in_allowed_pools_after_a_pool_is_edited(
    fleet: Fleet, tmp_path: Path
) -> None:
    labels = {"labels": ["eu-only"]}
    job = fleet.submit(tmp_path, "outside", "inside", "spare", epochs=3, data=labels)
    await_truth(lambda: fleet.training_machines(job) == {"inside"})
    held = set(fleet.of_pool("inside"))
    assert job.events("pool-refused") == [{"pool": "outside", "why": "may not see eu-only"}]

    # When the pool in which it trains loses the clearance for the data
    fleet.file.write_text(POOLS.replace("labels: [eu-only]", "labels: []", 1))

    await_truth(lambda: not held & set(fleet.of_pool("inside")))
    await_truth(lambda: fleet.training_machines(job) == {"spare"})
    assert {"pool": "inside", "why": "may not see eu-only"} in job.events("pool-refused")
    job.finish()
    assert not fleet.of_pool("outside"), "no machine was ever bought there for it"
    assert not (fleet.home / "cache" / "outside").exists(), "and none of its data is cached there"


@pytest.mark.ci
def test_budget_pauses_the_job_before_it_is_spent(fleet: Fleet, tmp_path: Path) -> None:
    budget, stop = 0.8, {"stop": {"max_cost_usd": 0.8}}
    workers = {"min": 1, "max": 2, "pools": ["dear"]}
    spec = held_spec(5, tmp_path / "hold", HELD_SECONDS, workers=workers, **stop)
    plan = fleet.client.plan(spec, samples=3600, samples_per_second=1.0)
    assert (plan.machines, plan.usd_per_hour, plan.hours) == (2, 72.0, 2.5)
    job = fleet.submit(tmp_path, "dear", epochs=5, **stop)

    await_truth(lambda: fleet.client.job(job.id).state == "paused")

    view = fleet.client.job(job.id)
    assert view.reason.startswith("stop.max_cost_usd: ")
    await_truth(lambda: not fleet.of_pool("dear"))
    cost = fleet.client.job(job.id).cost()
    assert 0 < cost.spent_usd < budget
    assert cost.on_demand_usd == pytest.approx(4 * cost.spent_usd)
    assert cost.wasted.booting.seconds > 0

    resumed = fleet.client.job(job.id).resume(max_cost_usd=100.0)
    # On a busy computer the first snapshot may not exist yet.
    assert resumed.state == ("running" if view.started_at else "starting")

    await_truth(lambda: budget < fleet.client.job(job.id).cost().spent_usd < 100.0)
    job.finish()
    await_truth(lambda: not fleet.of_pool("dear"))
