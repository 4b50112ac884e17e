"""Routes for workers, machines, pools, servers, and evictions."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.api_harness import Api
from support.fleet_records import machine_row
from support.waiting import await_truth

from vcasgd.client import Client
from vcasgd.errors import CloudDenied, Conflict, NotFound
from vcasgd.store.keys import LedgerKeys

MACHINE = machine_row("i-1", joined=True)


def beat(api: Api, job: str, worker: str, **heartbeat: Any) -> None:
    api.leases(job, worker).renew({"at": 5.0, "doing": "training", **heartbeat}, [])


def test_workers_of_a_job_and_of_all(api: Api, client: Client) -> None:
    first, second, over = api.submit(), api.submit(), api.submit()
    beat(api, first, "w-2", machine="i-1", steps=3)
    beat(api, first, "w-1", samples=float("inf"))
    beat(api, second, "w-3")
    beat(api, over, "w-4")
    api.finish(over)
    api.jobs.workers.quarantine(first, "w-1", "sent nonsense")

    rows = client.job(first).workers()

    assert [(row.name, row.job) for row in rows] == [("w-1", first), ("w-2", first)]
    assert rows[0].quarantined == "sent nonsense"
    assert rows[0].samples is None
    assert (rows[1].steps, rows[1].at) == (3, 5.0)
    assert [row.name for row in client.workers()] == ["w-1", "w-2", "w-3"]
    assert [row.name for row in client.job(over).workers()] == ["w-4"]


def test_invalid_heartbeat_hides_no_other_worker_nor_one_in_quarantine(
    api: Api, client: Client
) -> None:
    job, reason = api.submit(), "5 updates in a row were rejected, last: checksum"
    beat(api, job, "w-1", steps="many")
    beat(api, job, "w-2", steps=2)
    api.connection.hset(LedgerKeys(job).workers, mapping={"w-3": "[]", "no name": "{}"})
    api.jobs.workers.quarantine(job, "w-4", reason)

    rows = client.job(job).workers()

    assert [(row.name, row.steps, row.quarantined) for row in rows] == [
        ("w-1", None, None),
        ("w-2", 2, None),
        ("w-4", None, reason),
    ]


def test_instances_and_pools_are_those_of_the_controller(api: Api, client: Client) -> None:
    pool = {
        "machines": 1, "idle": 0, "launches": 2, "blocked_until": 9.0, "reason": "full",
        "extra": 1, "provider": "local", "spot": True, "capacity": 3, "labels": ["eu-only"],
        "trust": "own", "max_price_per_hour": None, "offers": [], "markets": [],
        "hardware": [{"cpus": 4, "memory_gb": 16, "gpus": 1, "gpu": "L4", "gpu_memory_gb": 24}],
    }  # fmt: skip
    api.control.publish({"i-1": MACHINE}, {"local": pool})

    assert [each.model_dump() for each in client.machines()] == [MACHINE]
    kinds = "4 CPUs, 16 GB of memory, 1 L4 of 24 GB"
    found = {"name": "local", **pool, "kinds": kinds}
    assert [each.model_dump() for each in client.pools()] == [found]


def test_status(api: Api, client: Client) -> None:
    before = client.status()
    job = api.submit()
    beat(api, job, "w-1")
    api.control.publish({"i-1": MACHINE}, {})
    api.control.hold("me", 600.0)
    after = client.status()

    assert (before.controller, after.controller) == (False, True)
    assert (before.active_jobs, after.active_jobs) == ([], [job])
    assert (after.workers, after.machines, after.servers) == (1, 1, 0)
    assert after.version


def test_stopped_controller_is_not_reported(api: Api, client: Client) -> None:
    api.control.hold("me", 0.05)

    await_truth(lambda: not client.status().controller)


@pytest.mark.parametrize(
    ("how", "asked"),
    [
        ({}, {"notice_seconds": None, "kill": False}),
        ({"notice_seconds": 0.5}, {"notice_seconds": 0.5, "kill": False}),
        ({"kill": True}, {"notice_seconds": None, "kill": True}),
    ],
)
def test_evictions_reach_the_controller(
    api: Api, client: Client, how: dict[str, Any], asked: dict[str, Any]
) -> None:
    api.control.publish({"i-1": MACHINE, "i-9": MACHINE}, {})
    # a worker may say that it is on the machine of another job
    beat(api, job := api.submit(), f"{job}.i-9", machine="i-1")
    expected = {"kind": "evict", **asked}

    by_machine, by_worker = client.evict(machine="i-1", **how), client.evict(f"{job}.i-9", **how)

    waiting = {"state": "waiting", "problem": None, "remedy": None}
    ids = by_machine.id, by_worker.id
    assert by_machine.model_dump() == {**expected, **waiting, "id": ids[0], "machine": "i-1"}
    assert by_worker.model_dump() == {**expected, **waiting, "id": ids[1], "machine": "i-9"}
    taken = [request for request, _ in api.control.requests()]
    # each request to the controller has the ID of its HTTP request
    assert len({each.pop("request") for each in taken}) == 2
    assert all(each.pop("sent_at") for each in taken)
    assert taken == [
        {**expected, "id": ids[0], "machine": "i-1"},
        {**expected, "id": ids[1], "machine": "i-9"},
    ]


def test_result_of_an_eviction_can_be_asked_for(
    api: Api, client: Client, http: httpx.Client
) -> None:
    api.control.publish({"i-1": MACHINE, "i-2": MACHINE}, {})
    answer = http.post("machines/i-1/evict")
    url = answer.headers["Location"].removeprefix("/api/v1/")
    refused = client.evict(machine="i-2", kill=True)
    (first, _), (second, _) = api.control.requests()
    assert http.get(url).json()["state"] == "waiting"

    api.control.finish(first)
    api.control.finish(second, CloudDenied("no permission", remedy="add it"))

    assert http.get(url).json()["state"] == "done"
    result = client.request(refused.id)
    assert (result.state, result.problem, result.remedy) == ("failed", "no permission", "add it")
    with pytest.raises(NotFound, match="no request nothing"):
        client.request("nothing")


def test_a_notice_that_a_cloud_never_gives_is_refused_at_once(api: Api, client: Client) -> None:
    api.control.publish({"i-1": {**MACHINE, "pool": "cloud"}}, {"cloud": {"provider": "aws"}})

    with pytest.raises(Conflict, match="no notice") as refusal:
        client.evict(machine="i-1")

    assert "--kill" in (refusal.value.remedy or "")
    assert api.control.requests() == []
    assert client.evict(machine="i-1", kill=True).state == "waiting"


def test_what_is_on_no_machine_is_not_evicted(api: Api, client: Client) -> None:
    over = api.submit()
    beat(api, over, "w-old", machine="i-1")
    api.finish(over)
    api.control.publish({"i-9": MACHINE}, {})
    beat(api, api.submit(), "w-1", machine="i-9")

    with pytest.raises(NotFound, match="no machine i-1"):
        client.evict(machine="i-1")
    with pytest.raises(NotFound, match="no worker w-old"):
        client.evict("w-old")
    with pytest.raises(Conflict, match="not on a machine"):
        client.evict("w-1")
    for names in ({}, {"worker": "w-1", "machine": "i-1"}):
        with pytest.raises(ValueError, match="either"):
            client.evict(**names)
    assert api.control.requests() == []
