"""State of the store, spending, and Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.api_harness import Api

from vcasgd.store.ledger.costs import Booking, Costs
from vcasgd.store.ledger.job import JobState

NODE = {
    "at": 5.0, "pid": 7, "token": 3, "memory_used_bytes": 1000, "memory_limit_bytes": None,
    "operations_per_second": 12, "replicas": 1, "publications_per_second": 2.5,
    "unreplicated": {"tensors": 4.0, "ledger": 3.0},
}  # fmt: skip
OFFER = {
    "pool": "local", "zone": "z", "machine_type": "process", "spot": True, "cpus": 1.0, "gpus": 0,
    "price_per_hour": 0.1, "on_demand_price_per_hour": 0.4, "as_of": 1.0, "source": "setting",
}  # fmt: skip


def machine(pool: str, state: str = "running") -> Mapping[str, Any]:
    return {
        "pool": pool, "state": state, "price_per_hour": 0.5, "on_demand_price_per_hour": 2.0,
    }  # fmt: skip


def spend(api: Api, job: str, pool: str, usd: float) -> None:
    name = f"{pool}|spot|working"
    amounts = {f"{name}|usd": usd, f"{name}|on_demand_usd": 3 * usd, f"{name}|lost_usd": 0.1}
    assert Costs(api.connection).book([Booking(f"m-{job}", None, "{}", job, amounts)]) == [True]


def test_store_shows_gauges_of_all_servers(api: Api, http: httpx.Client) -> None:
    api.servers.beat("node-0", {**NODE, "versions": {"j": 4}, "queued": {"j": 2}})
    api.servers.beat("node-1", {"at": 6.0})

    found = http.get("store").json()

    first, second = found["nodes"]
    assert (first["node"], first["versions"], first["queued"]) == ("node-0", {"j": 4}, {"j": 2})
    assert (first["publications_per_second"], first["memory_used_bytes"]) == (2.5, 1000)
    assert (first["replicas"], first["unreplicated_since"]) == (1, 4.0)
    assert (second["node"], second["memory_used_bytes"], second["queued"]) == ("node-1", None, {})
    assert found["ledger"]["memory_used_bytes"] > 100_000
    assert found["ledger"]["unreplicated_since"] == 3.0


def test_spend_sums_costs_by_pool(api: Api, http: httpx.Client) -> None:
    spend(api, api.submit(), "local", 1.0)
    spend(api, api.submit(), "aws", 2.0)
    machines = {"i-1": machine("local"), "i-2": machine("local"), "i-3": machine("gone")}
    api.control.publish(machines, {"local": {"offers": [OFFER]}, "idle": {"offers": None}})

    found = http.get("fleet/spend").json()

    assert (found["usd_per_hour"], found["on_demand_usd_per_hour"]) == (1.5, 6.0)
    assert (found["spent_usd"], found["on_demand_usd"], found["saved_usd"]) == (3.0, 9.0, 6.0)
    pools = {each["pool"]: each for each in found["pools"]}
    assert list(pools) == ["aws", "gone", "idle", "local"]
    assert (pools["local"]["machines"], pools["local"]["usd_per_hour"]) == (2, 1.0)
    assert (pools["local"]["spent_usd"], pools["aws"]["spent_usd"]) == (1.0, 2.0)
    assert pools["local"]["offers"][0]["price_per_hour"] == 0.1
    assert pools["idle"]["offers"] is None


def scraped(api: Api, **headers: str) -> dict[tuple[str, ...], float]:
    with api.visitor(headers) as http:
        answer = http.get(f"{api.url}/metrics")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/plain")
    return {
        (sample.name, *dict(sorted(sample.labels.items())).values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_metrics_cover_jobs_servers_and_machines(api: Api) -> None:
    job, over = api.submit(), api.submit()
    api.start_job(job)
    api.finish(over)
    api.account(job, 6, 1, updates=6, applied=60, staleness={"0": 4, "3": 1, "32": 1},
                staleness_sum=43, rejected={"checksum": 2})  # fmt: skip
    api.leases(job).renew({"at": 1.0, "pushed_bytes": 7, "fetched_bytes": 21}, [])
    spend(api, job, "local", 1.25)
    api.jobs.workers.record_losses([(job, "i-9", "evicted")])
    api.servers.beat("node-0", {**NODE, "queued": {job: 2}})
    api.control.publish({"i-1": machine("local"), "i-2": machine("local", "leaving")}, {})

    found = scraped(api)

    assert found["vcasgd_jobs", "running"] == 1
    assert found["vcasgd_jobs", "succeeded"] == 1
    assert found["vcasgd_job_updates_total", job] == 6
    assert found["vcasgd_job_samples_total", job] == 60
    assert found["vcasgd_job_updates_rejected_total", job, "checksum"] == 2
    assert found["vcasgd_job_machines_lost_total", "notice", job] == 1
    assert found["vcasgd_job_spent_usd_total", job] == 1.25
    assert found["vcasgd_job_workers", job] == 1
    assert found["vcasgd_job_pushed_bytes_total", job] == 7
    assert found["vcasgd_job_fetched_bytes_total", job] == 21
    assert found["vcasgd_job_staleness_versions_bucket", job, "2.0"] == 4
    assert found["vcasgd_job_staleness_versions_bucket", job, "31.0"] == 5
    assert found["vcasgd_job_staleness_versions_count", job] == 6
    assert found["vcasgd_job_staleness_versions_sum", job] == 43
    assert found["vcasgd_store_memory_bytes", "node-0"] == 1000
    assert found["vcasgd_store_memory_bytes", "ledger"] > 100_000
    assert found["vcasgd_store_updates_queued", "node-0"] == 2
    assert found["vcasgd_store_unreplicated", "node-0"] == 1
    assert found["vcasgd_fleet_machines", "local", "leaving"] == 1
    assert found["vcasgd_fleet_spend_usd_per_hour", "local"] == 1.0
    assert found[("vcasgd_controller_up",)] == 0
    assert not [key for key in found if over in key]


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Forwarded-Host"])
def test_metrics_through_a_proxy_need_the_token(api: Api, header: str) -> None:
    forwarded = {header: "127.0.0.1"}

    with api.visitor(forwarded) as http:
        assert http.get(f"{api.url}/metrics").status_code == 401
    assert scraped(api, **forwarded, Authorization=f"Bearer {api.token}")


def test_states_of_another_version_are_not_counted(api: Api) -> None:
    job = api.submit()
    api.connection.hset(f"vcasgd:{{fleet}}:job:{job}:record", "state", "dreaming")

    assert scraped(api)["vcasgd_jobs", JobState.STARTING.value] == 0
