"""What a job did in detail: staleness, machines, subtasks, its history made short, its spec."""

from __future__ import annotations

import json
import time

import httpx
import pytest
import yaml
from api_harness import Api, spec

from vcasgd.api.series import thinned
from vcasgd.spec import JobSpec
from vcasgd.store.job import State
from vcasgd.store.leases import Accounts
from vcasgd.store.machines import Machines

BORN = {"pool": "local", "zone": "", "instance_type": "process", "spot": True,
        "price_per_hour": 0.1, "replaced_by": None, "reason": None, "lost": False}  # fmt: skip


# -- staleness ----------------------------------------------------------------------------------


def test_staleness_is_a_histogram_without_gaps(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    assert http.get(f"jobs/{job}/staleness").json() == {"buckets": [], "mean": 0, "max": 0}
    api.account(job, 6, 0, staleness={"0": 3, "2": 1, "32": 2}, staleness_mean=11.0,
                staleness_max=40)  # fmt: skip

    found = http.get(f"jobs/{job}/staleness").json()

    counts = [bucket["updates"] for bucket in found["buckets"]]
    assert [bucket["staleness"] for bucket in found["buckets"]] == list(range(33))
    assert (counts[:3], sum(counts), counts[32]) == ([3, 0, 1], 6, 2)
    assert (found["mean"], found["max"]) == (11.0, 40)


# -- machines -----------------------------------------------------------------------------------


def test_machines_are_lanes_in_the_order_of_their_beginnings(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    died = [
        {"state": "running", "from": 5.0, "to": 9.0},
        {"state": "dead", "from": 9.0, "to": None},
    ]
    Machines(api.connection).keep(
        job,
        {
            "i-2": {**BORN, "spans": [{"state": "booting", "from": 8.0, "to": None}]},
            "i-1": {**BORN, "spans": died, "replaced_by": "i-2", "reason": "evicted", "lost": True},
        },
        [],
    )

    first, second = http.get(f"jobs/{job}/machines").json()

    assert (first["instance"], first["spans"], first["replaced_by"]) == ("i-1", died, "i-2")
    assert second["spans"] == [{"state": "booting", "from": 8.0, "to": None}]


def test_nothing_lasts_longer_than_the_job(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    lane = {**BORN, "spans": [{"state": "running", "from": 5.0, "to": None}]}
    Machines(api.connection).keep(job, {"i-1": lane}, [])
    api.finish(job)

    (found,) = http.get(f"jobs/{job}/machines").json()

    assert found["spans"][-1]["to"] == api.jobs.get(job).ended_at


# -- subtasks -----------------------------------------------------------------------------------


def test_each_subtask_has_a_letter(api: Api, http: httpx.Client) -> None:
    job = api.submit(epochs=3, subtasks_per_epoch=6)
    api.start_job(job)
    held = [api.lease(job, f"w-{number}") for number in range(5)]
    assert api.leases(job, "w-1").release(held[1])
    assert api.leases(job, "w-3").release(held[3])
    assert api.lease(job, "w-9").number == 1
    totals = json.dumps({"partly": [3]})
    assert Accounts(api.connection, job).account(1, 4, 0, totals, [held[0].number])

    found = http.get(f"jobs/{job}/subtasks").json()

    assert found == {"epoch": 1, "first": 0, "total": 6, "states": "arlplo"}
    assert http.get(f"jobs/{job}/subtasks?epoch=3").json()["states"] == "oooooo"
    assert http.get(f"jobs/{job}/subtasks?epoch=3").json()["first"] == 12


def test_a_subtask_that_is_applied_was_not_leased_again(api: Api, http: httpx.Client) -> None:
    job = api.submit(epochs=2, subtasks_per_epoch=2)
    api.start_job(job)
    assert api.leases(job).release(api.lease(job))
    api.lease(job)
    accounts = Accounts(api.connection, job)
    assert accounts.account(1, 2, 0, "{}", [0])
    assert http.get(f"jobs/{job}/subtasks").json()["states"] == "ao"
    assert accounts.account(1, 3, 1, "{}", [1])

    assert http.get(f"jobs/{job}/subtasks?epoch=1").json()["states"] == "aa"
    assert http.get(f"jobs/{job}/subtasks").json() == {
        "epoch": 2, "first": 2, "total": 2, "states": "oo",
    }  # fmt: skip


@pytest.mark.parametrize("epoch", ["0", "3", "x"])
def test_an_epoch_that_there_is_not(api: Api, http: httpx.Client, epoch: str) -> None:
    answer = http.get(f"jobs/{api.submit()}/subtasks?epoch={epoch}")

    assert (answer.status_code, answer.json()["field"]) == (422, "epoch")


# -- metrics ------------------------------------------------------------------------------------


def test_a_history_is_made_short_and_keeps_its_spikes(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    with api.connection.pipeline() as pipe:
        for at in range(3000):
            loss = 90.0 if at == 1234 else 1.0
            point = {"at": float(at), "loss": loss, "samples": at, "spent_usd": at / 1000}
            pipe.xadd(f"vcasgd:{{fleet}}:job:{job}:metrics", {"m": json.dumps(point)})
        pipe.execute()

    rows = http.get(f"jobs/{job}/metrics?points=100").json()
    few = http.get(f"jobs/{job}/metrics?points=50&names=loss,spent_usd").json()

    assert len(rows) <= 100
    assert (rows[0]["at"], rows[-1]["at"]) == (0.0, 2999.0)
    assert 90.0 in [row["loss"] for row in rows]
    assert len(few) <= 50
    assert few[0].keys() == {"id", "at", "loss", "spent_usd"}
    assert 90.0 in [row["loss"] for row in few]


def test_points_know_the_quality_of_the_model_then(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    api.start_job(job)
    api.account(job, 10, 1)
    for at in (1.0, 3.0):
        api.jobs.add_metrics(job, {"at": at})
    lease = api.lease(job)
    result = {"version": 10, "metrics": {"accuracy": 0.5, "loss": 2.0}, "worker": "w-1",
              "seconds": 1.0, "at": 2.0}  # fmt: skip
    assert api.leases(job).report_evaluation(lease, result)

    before, after = http.get(f"jobs/{job}/metrics?points=10").json()

    assert (before["accuracy"], before["validation"]) == (None, None)
    assert (after["accuracy"], after["validation"]) == (0.5, {"accuracy": 0.5, "loss": 2.0})


def test_a_hundred_thousand_points_are_made_short_at_once() -> None:
    """Fast enough to be done for each reader, and small enough to be sent."""
    rows = [
        {"id": f"{at}-0", "at": float(at), "loss": 1.0 / (at + 1), "updates_per_second": at % 7.0,
         "staleness_mean": at % 11.0, "staleness_max": at % 13, "workers": at % 200}
        for at in range(100_000)
    ]  # fmt: skip
    rows[77_777]["loss"] = None
    rows[55_555]["updates_per_second"] = 1000.0

    started = time.process_time()
    kept = thinned(rows, ("loss", "updates_per_second", "staleness_mean", "workers"), 500)
    seconds = time.process_time() - started

    assert 100 < len(kept) <= 500
    assert rows[55_555] in kept
    assert kept == sorted(kept, key=lambda row: row["at"])
    assert seconds < 5
    assert len(json.dumps(kept)) < 100_000


def test_what_is_no_number_is_no_spike() -> None:
    rows = [{"at": at, "loss": {3: "high", 4: None, 5: [1]}.get(at, 1.0)} for at in range(100)]
    rows[50]["loss"] = 7

    assert rows[50] in thinned(rows, ("loss",), 10)


@pytest.mark.parametrize("most", [10, 11, 50])
def test_there_are_never_more_points_than_asked_for(most: int) -> None:
    rows = [{"at": at, **dict.fromkeys("abcdefgh", at * 7919 % 1009)} for at in range(5000)]

    for names in ("", "a", "abcdefgh"):
        kept = thinned(rows, tuple(names), most)
        assert (kept[0], kept[-1]) == (rows[0], rows[-1])
        assert len(kept) <= most


# -- what a job says ----------------------------------------------------------------------------


def test_a_text_that_is_a_job(api: Api, http: httpx.Client) -> None:
    text = yaml.safe_dump({"name": "x", "task": "a:B", "epochs": 1, "subtasks_per_epoch": 2})

    found = http.post("jobs/validate", json={"yaml": text}).json()

    assert (found["valid"], found["errors"]) == (True, [])
    assert found["spec"]["workers"]["min"] >= 1
    assert api.jobs.all() == []


def test_every_mistake_of_a_text_is_named(http: httpx.Client) -> None:
    text = "name: x\ntask: nothing\nepochs: 0\nworkers: {mox: 3}\n"

    found = http.post("jobs/validate", json={"yaml": text}).json()

    assert (found["valid"], found["spec"]) == (False, None)
    messages = {each["path"]: each["message"] for each in found["errors"]}
    assert messages.keys() == {"task", "epochs", "subtasks_per_epoch", "workers.mox"}
    assert messages["subtasks_per_epoch"] == "is required"


@pytest.mark.parametrize(
    "text", ["", "- 1", "a: [", "a: 2026-99-99", "[" * 3000, "\x00", "a: !!x 1"]
)
def test_a_text_that_is_no_job_at_all(http: httpx.Client, text: str) -> None:
    found = http.post("jobs/validate", json={"yaml": text}).json()

    assert (found["valid"], found["errors"][0]["path"]) == (False, "")


def test_the_schema_knows_the_fields(http: httpx.Client) -> None:
    schema = http.get("schema/job").json()

    assert {"name", "task", "epochs", "workers", "stop"} <= schema["properties"].keys()


def test_the_yaml_of_a_job_is_the_job(api: Api, http: httpx.Client) -> None:
    job = api.submit(stop={"max_duration": "6h"}, checkpoint={"every": "5m"})

    answer = http.get(f"jobs/{job}/spec")

    assert answer.headers["Content-Type"].startswith("application/yaml")
    assert JobSpec.parse(yaml.safe_load(answer.text)) == spec(
        stop={"max_duration": "6h"}, checkpoint={"every": "5m"}
    )


@pytest.mark.parametrize("what", ["staleness", "machines", "subtasks", "spec"])
def test_of_a_job_that_there_is_not(http: httpx.Client, what: str) -> None:
    assert http.get(f"jobs/none-abc234/{what}").status_code == 404


def test_of_a_job_that_has_just_begun(api: Api, http: httpx.Client) -> None:
    job = api.submit()

    assert api.jobs.get(job).state is State.STARTING
    assert http.get(f"jobs/{job}/machines").json() == []
    assert http.get(f"jobs/{job}/subtasks").json()["states"] == "ooooo"
    assert http.get(f"jobs/{job}/metrics?points=100").json() == []
