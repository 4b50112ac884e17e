"""The SDK: what a notebook shows, and all that a page shows."""

from __future__ import annotations

from api_harness import Api

from vcasgd.client import Client
from vcasgd.store.job import State


def test_a_notebook_shows_a_job_and_runs_nothing_of_it(api: Api, client: Client) -> None:
    job = api.submit()
    api.finish(job, State.FAILED, reason="<script>alert(1)</script>")

    html = client.job(job)._repr_html_()

    assert f"<caption>{job}</caption>" in html
    assert "failed: &lt;script&gt;" in html
    assert "<script>" not in html


def test_everything_that_a_page_shows_is_there_for_programs(api: Api, client: Client) -> None:
    job = api.submit()
    api.start_job(job)
    for at in range(30):
        api.jobs.add_metrics(job, {"at": float(at), "loss": 1.0, "updates": at})

    assert client.staleness(job)["buckets"] == []
    assert client.machines(job) == []
    assert client.subtasks(job)["states"] == "ooooo"
    assert client.subtasks(job, 2)["first"] == 5
    assert "task: train:Digits" in client.spec(job)
    assert client.validate("name: x")["valid"] is False
    assert "properties" in client.job_schema()
    assert client.spend()["usd_per_hour"] == 0
    assert client.store()["nodes"] == []
    assert len(client.metrics(job)) == 30
    short = client.metrics(job, points=10, names=["loss", "updates"])
    assert len(short) <= 10
    assert set(short[0]) == {"id", "at", "loss", "updates"}
    assert len(client.metrics(job, names=["loss"])[0]) == 3


def test_a_follower_of_everything_outlives_the_api(own_api: Api) -> None:
    job = own_api.submit()
    with own_api.client() as client:
        changes = client.changes()
        assert next(data for kind, data in changes if kind == "job")["id"] == job
        own_api.kill()
        own_api.jobs.event(job, "count", "while it was away")
        own_api.start()

        assert next(data for kind, data in changes if kind == "event")["kind"] == "count"
        changes.close()
