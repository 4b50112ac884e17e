"""Details of a job: staleness, machines, subtasks, thinned metrics, and job files."""

from __future__ import annotations

import json
import math
from operator import itemgetter

import httpx
import pytest
import yaml
from support.api_harness import Api, spec

from vcasgd.spec.job import JobSpec
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.events import EventLog
from vcasgd.store.ledger.leases import Lease, WorkKind
from vcasgd.store.ledger.servers import Accounts

BORN = {"pool": "local", "zone": "", "machine_type": "process", "spot": True,
        "price_per_hour": 0.1, "replaced_by": None, "reason": None, "lost": False}  # fmt: skip


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


def test_machines_are_ordered_by_their_start(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    start = api.jobs.get(job).created_at
    died = [
        {"state": "running", "from": start + 5, "to": start + 9},
        {"state": "dead", "from": start + 9, "to": None},
    ]
    booting = {**BORN, "spans": [{"state": "booting", "from": start + 8, "to": None}]}
    dead = {**BORN, "spans": died, "replaced_by": "i-2", "reason": "evicted", "lost": True}
    EventLog(api.connection).update_timelines({job: {"i-2": booting, "i-1": dead}})

    first, second = http.get(f"jobs/{job}/timelines").json()

    assert (first["machine"], first["spans"], first["replaced_by"]) == ("i-1", died, "i-2")
    assert second["spans"] == [{"state": "booting", "from": start + 8, "to": None}]


def test_timelines_start_and_end_with_the_job(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    start = api.jobs.get(job).created_at
    before = {**BORN, "spans": [{"state": "running", "from": 1.0, "to": start - 1}]}
    during = [
        {"state": "booting", "from": 5.0, "to": start},
        {"state": "running", "from": 6.0, "to": None},
    ]
    given = {**BORN, "spans": during, "given_to": "other-1"}
    EventLog(api.connection).update_timelines({job: {"i-1": given, "i-0": before}})
    api.finish(job)

    (found,) = http.get(f"jobs/{job}/timelines").json()

    end = api.jobs.get(job).ended_at
    assert found["spans"] == [{"state": "running", "from": start, "to": end}]
    assert found["given_to"] == "other-1"


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

    assert found == {
        "epoch": 1, "first": 0, "total": 6, "per_letter": 1, "states": "arlplo",
        "counts": {"a": 1, "r": 1, "l": 2, "p": 1, "o": 1},
    }  # fmt: skip
    assert http.get(f"jobs/{job}/subtasks?epoch=3").json()["states"] == "oooooo"
    assert http.get(f"jobs/{job}/subtasks?epoch=3").json()["first"] == 12


def test_applied_subtask_is_not_shown_as_leased_again(api: Api, http: httpx.Client) -> None:
    job = api.submit(epochs=2, subtasks_per_epoch=2)
    api.start_job(job)
    assert api.leases(job).release(api.lease(job))
    api.lease(job)
    accounts = Accounts(api.connection, job)
    assert accounts.account(1, 2, 0, "{}", [0])
    assert http.get(f"jobs/{job}/subtasks").json()["states"] == "ao"
    assert accounts.account(1, 3, 1, "{}", [1])

    assert http.get(f"jobs/{job}/subtasks?epoch=1").json()["states"] == "aa"
    found = http.get(f"jobs/{job}/subtasks").json()
    assert (found["epoch"], found["first"], found["states"]) == (2, 2, "oo")


def test_the_last_epoch_can_have_fewer_subtasks(api: Api, http: httpx.Client) -> None:
    job = api.submit(epochs=None, max_samples=150, subtasks_per_epoch=5)
    progress = http.get(f"jobs/{job}").json()["progress"]
    assert (progress["epochs"], progress["samples_expected"]) == (None, 150)

    api.start_job(job, samples=100)

    progress = http.get(f"jobs/{job}").json()["progress"]
    assert (progress["epochs"], progress["samples_expected"]) == (2, 150)
    assert progress["subtasks_total"] == 8
    found = http.get(f"jobs/{job}/subtasks?epoch=2").json()
    assert (found["epoch"], found["first"], found["states"]) == (2, 5, "ooo")


def test_many_subtasks_share_letters(api: Api, http: httpx.Client) -> None:
    job = api.submit(epochs=1, subtasks_per_epoch=100_000)
    api.start_job(job, samples=100_000)
    accounts = Accounts(api.connection, job)
    for subtask in range(10):
        assert api.lease(job, f"w-{subtask}").number == subtask
    assert api.leases(job, "w-7").release(Lease(WorkKind.TRAIN, 7, 9))
    assert api.lease(job, "w-10").number == 7
    done = [*range(5), *range(20_000, 20_250), 99_999]
    assert accounts.account(1, 4, 0, "{}", done)

    found = http.get(f"jobs/{job}/subtasks?letters=1000").json()
    assert (found["total"], found["per_letter"]) == (100_000, 100)
    assert found["counts"] == {"a": 256, "r": 1, "l": 4, "p": 0, "o": 99_739}
    assert found["states"] == "r" + "o" * 199 + "aap" + "o" * 796 + "p"
    few = http.get(f"jobs/{job}/subtasks?letters=7").json()
    assert (few["per_letter"], len(few["states"])) == (14286, 7)
    assert len(http.get(f"jobs/{job}/subtasks").json()["states"]) == 10_000


def test_subtasks_chosen_by_the_platform_appear_once_the_data_is_known(
    api: Api, http: httpx.Client
) -> None:
    job = api.submit(subtasks_per_epoch=None)
    assert http.get(f"jobs/{job}/subtasks").json()["states"] == ""
    assert http.get(f"jobs/{job}").json()["progress"]["subtasks_total"] is None

    api.start_job(job, samples=100)

    assert http.get(f"jobs/{job}/subtasks").json()["states"] == "o" * 25
    assert http.get(f"jobs/{job}").json()["progress"]["subtasks_total"] == 50


def test_thinned_history_keeps_its_spikes(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    with api.connection.pipeline() as pipe:
        for at in range(3000):
            loss = {1234: 90.0, 1111: math.nan}.get(at, 1.0)
            point = {"at": float(at), "loss": loss, "samples": at, "spent_usd": at / 1000}
            pipe.xadd(f"vcasgd:{{fleet}}:job:{job}:metrics", {"m": json.dumps(point)})
        pipe.execute()

    for points, names in ((10, ""), (11, ""), (500, ""), (50, "loss,spent_usd")):
        query = f"points={points}" + (f"&names={names}" if names else "")
        rows = http.get(f"jobs/{job}/metrics?{query}").json()

        assert len(rows) <= points
        assert (rows[0]["at"], rows[-1]["at"]) == (0.0, 2999.0)
        assert rows == sorted(rows, key=itemgetter("at"))
        assert 90.0 in [row["loss"] for row in rows]
    assert rows[0].keys() == {"id", "at", "loss", "spent_usd"}


def test_points_contain_the_newest_evaluation(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    api.start_job(job)
    for at in (1.0, 3.0):
        api.jobs.add_metrics(job, {"at": at})
    api.evaluate(job, 1, {"accuracy": 0.5, "loss": 2.0}, version=10, at=2.0)

    before, after = http.get(f"jobs/{job}/metrics?points=10").json()

    assert (before["accuracy"], before["validation"]) == (None, None)
    assert (after["accuracy"], after["validation"]) == (0.5, {"accuracy": 0.5, "loss": 2.0})


def test_thinned_history_can_be_continued(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    for at in range(300):
        api.jobs.add_metrics(job, {"at": float(at), "loss": 99.0 if at == 150 else 1.0})
    path = f"jobs/{job}/metrics?points=20"

    first = http.get(path).json()
    api.jobs.add_metrics(job, {"at": 300.0, "loss": 2.0, "novel": 1})
    second = http.get(path).json()
    rest = http.get(f"{path}&after={first[-1]['id']}").json()

    assert len(first) <= 20
    assert 99.0 in [row["loss"] for row in first]
    assert (first[0]["at"], first[-1]["at"], second[-1]["at"]) == (0, 299, 300)
    assert [row["at"] for row in rest] == [300]


def test_trimmed_or_replaced_history_is_read_again(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    key, path = LedgerKeys(job).metrics, f"jobs/{job}/metrics?points=5000"
    for at in range(200):
        api.jobs.add_metrics(job, {"at": float(at)})
    assert len(http.get(path).json()) == 200

    # When the ledger drops its oldest entries
    api.connection.xtrim(key, maxlen=50, approximate=False)
    assert [row["at"] for row in http.get(path).json()] == list(map(float, range(150, 200)))

    # And when it restarts with another history
    api.connection.delete(key)
    api.jobs.add_metrics(job, {"at": 7.0})
    assert [row["at"] for row in http.get(path).json()] == [7.0]


def test_long_responses_are_compressed_but_not_models(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    for at in range(100):
        api.jobs.add_metrics(job, {"at": float(at)})
    name, data = api.store_checkpoint(job, 1, size=5000)

    long = http.get(f"jobs/{job}/metrics", headers={"Accept-Encoding": "gzip"})
    model = http.get(f"jobs/{job}/checkpoints/{name}", headers={"Accept-Encoding": "gzip"})

    assert long.headers["Content-Encoding"] == "gzip"
    assert int(long.headers["Content-Length"]) < len(long.content) / 5
    assert "Content-Encoding" not in model.headers
    assert int(model.headers["Content-Length"]) == len(data)


def test_valid_job_file_is_accepted(api: Api, http: httpx.Client) -> None:
    text = yaml.safe_dump({"name": "x", "task": "a:B", "epochs": 1, "subtasks_per_epoch": 2})

    found = http.post("jobs/validate", json={"yaml": text}).json()

    assert (found["valid"], found["errors"], found["warnings"]) == (True, [], [])
    assert found["spec"]["workers"]["min"] >= 1
    assert api.jobs.all() == []


def test_validation_lists_every_mistake(http: httpx.Client) -> None:
    text = "name: x\ntask: nothing\nepochs: 0\nworkers: {mox: 3}\n"

    found = http.post("jobs/validate", json={"yaml": text}).json()

    assert (found["valid"], found["spec"]) == (False, None)
    messages = {each["path"]: each["message"] for each in found["errors"]}
    assert messages.keys() == {"task", "epochs", "workers.mox"}


@pytest.mark.parametrize(
    "text", ["", "- 1", "a: [", "a: 2026-99-99", "[" * 3000, "\x00", "a: !!x 1"]
)
def test_validation_rejects_other_texts(http: httpx.Client, text: str) -> None:
    found = http.post("jobs/validate", json={"yaml": text}).json()

    assert (found["valid"], found["errors"][0]["path"]) == (False, "")


def test_yaml_of_a_job_parses_to_the_job(api: Api, http: httpx.Client) -> None:
    job = api.submit(stop={"max_duration": "6h"}, checkpoint={"every": "5m"})

    answer = http.get(f"jobs/{job}/spec")

    assert answer.headers["Content-Type"].startswith("application/yaml")
    assert JobSpec.parse(yaml.safe_load(answer.text)) == spec(
        stop={"max_duration": "6h"}, checkpoint={"every": "5m"}
    )
