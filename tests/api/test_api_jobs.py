"""Submission, listing, and control of jobs over HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import httpx
import pytest
from support.api_harness import Api, spec, zipped

from vcasgd.client import Client
from vcasgd.errors import Conflict, NotFound, SpecError
from vcasgd.schemas.jobs import TrafficView
from vcasgd.store.keys import LedgerKeys
from vcasgd.task.package import digest_of


def body(client: Client, **fields: Any) -> dict[str, Any]:
    return {"spec": spec(**fields).model_dump(mode="json"), "package": client.upload(zipped())}


def test_submitted_job_is_shown_with_all_fields(api: Api, client: Client) -> None:
    package = zipped()

    job = client.submit(spec(name="mnist", args={"depth": 3}), package)

    assert job == client.job(job.id)
    assert (job.name, job.state, job.over) == ("mnist", "starting", False)
    assert job.package == digest_of(package)
    assert job.spec.args == {"depth": 3}
    assert job.spec.checkpoint.every == timedelta(minutes=5)
    assert job.progress.fraction == 0
    assert job.progress.samples_expected is None
    assert api.storage.get(f"packages/{job.package}.zip") == package


def test_concurrent_submissions_with_one_key_create_one_job(
    api: Api, http: httpx.Client, client: Client
) -> None:
    request, headers = body(client), {"Idempotency-Key": "race"}

    with ThreadPoolExecutor(12) as pool:
        answers = list(
            pool.map(lambda _: http.post("jobs", json=request, headers=headers), range(12))
        )

    assert sorted(answer.status_code for answer in answers) == [200] * 11 + [201]
    assert len({answer.json()["id"] for answer in answers}) == 1
    (location,) = {answer.headers["Location"] for answer in answers}
    assert http.get(http.base_url.join(location)).json() == answers[0].json()
    assert len(api.jobs.all()) == 1


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"update": {"rule": "vc-asgd", "alpha": 2}}, "update.alpha"),
        ({"args": {"x": float("nan")}}, "args"),
    ],
)
def test_invalid_spec_names_its_field(
    http: httpx.Client, client: Client, fields: dict[str, Any], field: str
) -> None:
    request = body(client)
    request["spec"] |= fields

    answer = http.post(
        "jobs", content=json.dumps(request), headers={"Content-Type": "application/json"}
    )

    assert answer.status_code == 422
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.json()["field"] == field
    assert answer.json()["type"] == "urn:vcasgd:problem:invalid-request"
    assert client.jobs() == []


def test_a_mistake_in_a_request_is_explained_as_in_a_job_file(api: Api, http: httpx.Client) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    problem = http.post("jobs", content=b"{}", headers=form).json()
    assert problem["detail"] == "the body is not JSON"
    assert "Content-Type: application/json" in problem["remedy"]
    for method, path, content, detail in (
        ("POST", "jobs/validate", {}, "yaml: is required"),
        ("PATCH", f"jobs/{api.submit()}", {"epochs": 3}, "epochs: there is no such field"),
        (
            "POST",
            "tokens",
            {"name": "Ann", "scope": "read"},
            "name: must be up to 40 lowercase letters and digits, and dashes between them",
        ),
    ):
        answer = http.request(method, path, json=content)
        assert (answer.status_code, detail in answer.json()["detail"]) == (422, True), answer.text


def test_job_requires_an_uploaded_package(http: httpx.Client, client: Client) -> None:
    request = body(client) | {"package": "ab" * 32}

    problem = http.post("jobs", json=request).json()

    assert (problem["status"], problem["field"]) == (422, "package")
    assert "PUT" in problem["remedy"]


def test_job_with_an_unknown_pool_is_refused(api: Api, http: httpx.Client, client: Client) -> None:
    api.control.publish({}, {"local": {}})
    request = body(client)
    request["spec"] |= {"workers": {"pools": ["local", "nowhere"]}}

    problem = http.post("jobs", json=request).json()

    assert (problem["status"], problem["field"]) == (422, "workers.pools")
    assert "'nowhere'" in problem["detail"]
    assert problem["remedy"] == "choose from local"


def test_jobs_are_listed_newest_first(api: Api, client: Client) -> None:
    first, second, third = (api.submit(name=f"job-{number}") for number in range(3))
    api.jobs.cancel(second)

    assert [job.id for job in client.jobs()] == [third, second, first]
    assert [job.id for job in client.jobs(limit=2)] == [third, second]
    assert [job.id for job in client.jobs(state="starting", limit=1)] == [third]
    assert [job.id for job in client.jobs(state="cancelled")] == [second]
    with pytest.raises(SpecError, match=r"state: must be 'starting'.* or 'active' or 'queued'"):
        client.jobs(state="done")


def test_jobs_are_listed_in_pages_that_link_to_the_next(
    api: Api, client: Client, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [api.submit() for _ in range(7)][::-1]
    for job in jobs[::2]:
        api.finish(job)

    page = http.get("jobs", params={"limit": 2, "state": "succeeded"})
    api.submit()  # moves nothing to another page
    client.job(jobs[2]).delete()  # the last one of the page
    further = http.get(page.links["next"]["url"])

    assert [each["id"] for each in page.json() + further.json()] == jobs[::2]
    assert "next" not in further.links
    del jobs[2]
    assert http.get("jobs", params={"after": jobs[4]}).json()[0]["id"] == jobs[5]
    assert http.get("jobs", params={"after": "x-unknown"}).status_code == 404
    monkeypatch.setattr("vcasgd.client.client.PAGE", 3)
    assert [each.id for each in client.jobs()][1:] == jobs
    assert [each.id for each in client.jobs(limit=5)][1:] == jobs[:4]


def test_jobs_are_listed_by_the_start_of_their_ids(api: Api, http: httpx.Client) -> None:
    first, other, second, third = (api.submit(name=name) for name in ("a", "b", "a", "a"))
    page = http.get("jobs", params={"prefix": "a-", "limit": 2})
    further = http.get(page.links["next"]["url"])
    assert [each["id"] for each in page.json() + further.json()] == [third, second, first]
    assert [each["id"] for each in http.get("jobs", params={"prefix": other[:-1]}).json()] == [
        other
    ]


def test_priority_and_weight_change_until_the_job_ends(
    api: Api, client: Client, http: httpx.Client
) -> None:
    job = api.submit()
    changed = client.job(job).change(priority="high")
    assert (changed.spec.priority, changed.spec.weight) == ("high", 1.0)
    assert client.job(job).change(weight=2).spec.weight == 2.0
    assert client.job(job).spec.priority == "high"
    texts = [each.text for each in client.job(job).events() if each.kind == "changed"]
    assert texts == ["priority is now high", "weight is now 2.0"]

    for change, field in (({"priority": "top"}, "priority"), ({"weight": 0}, "weight"),
                          ({"epochs": 9}, "epochs")):  # fmt: skip
        problem = http.patch(f"jobs/{job}", json=change).json()
        assert (problem["status"], problem["field"]) == (422, field)
    assert client.job(job).change() == client.job(job), "no field, no change"

    api.finish(job)
    with pytest.raises(Conflict, match="has succeeded"):
        client.job(job).change(priority="low")
    with pytest.raises(NotFound):
        client.job("nothing").change(priority="low")


def test_job_that_waits_for_machines_says_why(api: Api, client: Client) -> None:
    job, other = api.submit(), api.submit()
    text = "position 2 of 3: waits for 4 of 4 machines; 2 higher-priority jobs have machines"
    place = {"text": text, "position": 2, "length": 3}
    api.jobs.set_waiting({job: {**place, "has_machines": False}})
    found = client.job(job)
    assert (found.waiting, found.status, found.state) == (text, "queued", "starting")
    assert (found.queue.position, found.queue.length) == (2, 3)
    assert [each.id for each in client.jobs("queued")] == [job]
    assert client.job(other).waiting is None
    assert (client.job(other).status, client.job(other).queue) == ("starting", None)
    api.jobs.set_waiting({job: {**place, "has_machines": True}})
    assert client.job(job).status == "starting", "it has some of its machines"
    api.start_job(job)
    client.job(job).pause()
    assert client.job(job).waiting is None, "a paused job waits for nothing"
    api.jobs.set_waiting({job: {}})
    client.job(job).resume()
    assert client.job(job).waiting is None


def test_deleted_job_is_gone_with_its_checkpoints(api: Api, client: Client) -> None:
    job, other = api.submit(), api.submit()
    with pytest.raises(Conflict, match="has not ended"):
        client.job(job).delete()
    api.finish(job)
    for each in (job, other):
        api.storage.put(f"jobs/{each}/checkpoints/one.safetensors", b"data")

    client.job(job).delete()

    with pytest.raises(NotFound):
        client.job(job).delete()
    assert [each.id for each in client.jobs()] == [other]
    assert not api.storage.names(f"jobs/{job}")
    assert api.storage.names(f"jobs/{other}").keys() == {
        f"jobs/{other}/checkpoints/one.safetensors"
    }


@pytest.mark.parametrize("job", ["none-abc234", "../servers", "a/b", "ünï", "%2e%2e", "x" * 500])
def test_no_such_job(client: Client, job: str) -> None:
    with pytest.raises(NotFound):
        client.job(job)


def test_progress_follows_the_applied_record(api: Api, client: Client) -> None:
    job = api.submit(epochs=2, subtasks_per_epoch=5)
    api.start_job(job, samples=100)
    api.account(
        job, 7, 1, updates=7, applied=150, repeated=4, staleness_mean=0.5, staleness_max=3,
        rejected={"duplicate": 2},
    )  # fmt: skip

    view = client.job(job)

    assert (view.state, view.version) == ("running", 7)
    assert (view.progress.samples_expected, view.progress.samples_applied) == (200, 150)
    assert (view.progress.fraction, view.progress.samples_repeated) == (0.75, 4)
    assert (view.progress.finished_epochs, view.progress.subtasks_total) == (1, 10)
    assert view.progress.samples_lost is None
    assert (view.totals.updates, view.totals.staleness_max) == (7, 3)
    assert view.totals.rejected == {"duplicate": 2}


def test_view_contains_the_bytes_of_all_workers(api: Api, client: Client) -> None:
    job, idle = api.submit(), api.submit()
    api.leases(job, "w-1").renew({"pushed_bytes": 10, "fetched_bytes": 300}, [])
    api.leases(job, "w-2").renew({"pushed_bytes": 5, "fetched_bytes": 70}, [])
    api.jobs.workers.remove(job, "w-1")

    (row,) = client.job(job).workers()
    assert (row.pushed_bytes, row.fetched_bytes) == (5, 70)
    assert client.job(job).traffic == TrafficView(pushed_bytes=15, fetched_bytes=370)
    listed = {each.id: each.traffic for each in client.jobs()}
    assert listed == {job: client.job(job).traffic, idle: TrafficView()}


def test_lost_samples_are_null_before_all_epochs_have_finished(api: Api, client: Client) -> None:
    whole, stopped = api.submit(), api.submit()
    for job, finished, applied in ((whole, 2, 200), (stopped, 1, 100)):
        api.start_job(job, samples=100)
        api.account(job, 9, finished, applied=applied)
        api.finish(job)

    assert client.job(whole).progress.samples_lost == 0
    assert client.job(stopped).progress.samples_lost is None


@pytest.mark.parametrize(
    ("metric", "mode", "values", "best"),
    [
        ("loss", "min", [4.0, 2.5, 3.0], 2.5),
        ("accuracy", "max", [0.8, 0.9, 0.7], 0.9),
        ("f1", "max", [float("nan")], None),
    ],
)
def test_view_contains_evaluations_and_the_best_epoch_by_its_metric(
    api: Api, http: httpx.Client, metric: str, mode: str, values: list[float], best: float | None
) -> None:
    job = api.submit(epochs=4, stop={"metric": {"name": "f1", "mode": mode}} if not best else {})
    api.start_job(job)
    for epoch, value in enumerate(values, start=1):
        api.evaluate(job, epoch, {metric: value, "other": float("nan")})

    view = http.get(f"jobs/{job}").json()

    assert [row["epoch"] for row in view["evaluations"]] == list(range(1, len(values) + 1))
    assert all(row["metrics"]["other"] is None for row in view["evaluations"])
    expected = {"epoch": 2, "samples": 200, "step": None, "metric": metric, "mode": mode,
                "value": best}  # fmt: skip
    assert view["best"] == (expected if best else None)


def test_internal_error_reveals_no_details(api: Api, http: httpx.Client) -> None:
    damaged, mistyped = api.submit(), api.submit()
    api.connection.hset(LedgerKeys(damaged).shards, "0:totals", "{inner-secret")
    api.connection.delete(LedgerKeys(mistyped).record)
    api.connection.set(LedgerKeys(mistyped).record, "inner-secret")

    for job in (damaged, mistyped):
        answer = http.get(f"jobs/{job}")

        assert answer.status_code == 500
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert "internal error" in answer.json()["detail"]
        assert "inner-secret" not in answer.text
    log = api.log.read_text()
    assert f"JobUnreadable: the stored data of job {damaged}" in log
    assert "WRONGTYPE" in log
