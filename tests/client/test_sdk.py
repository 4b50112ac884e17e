"""The client's job objects, tables, event files, and all other calls."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.api_harness import Api
from support.waiting import PATIENCE

from vcasgd.client import Client
from vcasgd.errors import ApiError, Conflict, SpecError, StackError
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState
from vcasgd.store.ledger.job import JobState


@pytest.fixture
def job(api: Api) -> str:
    """Create a job with three points of metrics, and an evaluation before the last one."""
    name = api.submit()
    api.start_job(name)
    for at in (1.0, 2.0, 4.0):
        api.jobs.add_metrics(name, {"at": at, "version": int(5 * at), "loss": 1 / at})
    api.evaluate(name, 1, {"accuracy": 0.5, "top5": 0.75}, version=10, at=3.0)
    return name


def test_job_can_be_controlled(client: Client, job: str) -> None:
    paused = client.job(job).pause()
    resumed = paused.resume(max_cost_usd=3)

    assert (paused.state, resumed.state) == ("paused", "running")
    assert resumed.spec.stop.max_cost_usd == 3
    assert paused.refreshed() == resumed
    assert [event.kind for event in resumed.events()][-1] == "job-running"
    with pytest.raises(ApiError, match="has not ended after"):
        resumed.wait(timeout=0.1)
    assert resumed.cancel().wait().state == "cancelled"
    with pytest.raises(Conflict):
        resumed.pause()
    assert "client" not in resumed.model_dump(mode="json")
    assert "token" not in repr(resumed)


def test_metrics_fit_into_a_pandas_table(client: Client, job: str) -> None:
    # Imported here, because each process of the tests would wait for it.
    import pandas

    rows = [row.model_dump(exclude_none=True) for row in client.job(job).metrics()]

    table = pandas.json_normalize(rows)

    assert list(table["loss"]) == [1.0, 0.5, 0.25]
    assert list(table["version"]) == [5, 10, 20]
    assert table["validation.top5"].isna().tolist() == [True, True, False]
    assert table["validation.accuracy"].iloc[-1] == table["accuracy"].iloc[-1] == 0.5


def test_notebook_shows_a_job_and_escapes_its_texts(api: Api, client: Client) -> None:
    job = api.submit()
    api.finish(job, JobState.FAILED, reason="<script>alert(1)</script>")

    html = client.job(job)._repr_html_()

    assert f"<caption>{job}</caption>" in html
    assert "failed: &lt;script&gt;" in html
    assert "<script>" not in html


def test_client_offers_everything_that_pages_show(api: Api, client: Client) -> None:
    job = api.submit()
    api.start_job(job)
    for at in range(30):
        api.jobs.add_metrics(job, {"at": float(at), "loss": 1.0, "updates": at})

    assert client.job(job).staleness().buckets == []
    assert client.job(job).timelines() == []
    assert client.job(job).subtasks().states == "ooooo"
    assert client.job(job).subtasks(2).first == 5
    assert "task: train:Digits" in client.job(job).file()
    assert client.validate("name: x").valid is False
    assert "properties" in client.job_schema()
    assert client.spend().usd_per_hour == 0
    assert client.store().nodes == []
    assert len(client.job(job).metrics()) == 30
    short = client.job(job).metrics(points=10, names=["loss", "updates"])
    assert len(short) <= 10
    assert short[0].model_fields_set == {"id", "at", "loss", "updates"}
    assert client.job(job).metrics(names=["loss"])[0].model_fields_set == {"id", "at", "loss"}


def test_a_wrong_field_of_a_spec_raises_the_error_of_a_job_file() -> None:
    with pytest.raises(SpecError, match="epochs: must be greater") as caught:
        JobSpec(name="a", task="train:Digits", epochs=-1)
    assert caught.value.details["field"] == "epochs"


def test_a_job_prints_as_one_line(api: Api, client: Client) -> None:
    job = api.submit()

    assert str(client.job(job)) == f"{job} starting, 0% done"


def test_a_client_without_arguments_finds_the_local_stack(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VCASGD_HOME", str(tmp_path))
    with pytest.raises(StackError, match="there is no stack in"):
        Client()
    StackState(api_url=api.url).write(tmp_path)
    (tmp_path / "token").write_text(api.token)

    with StackHome(tmp_path).acquire() as lock, Client() as client:
        assert lock is not None
        assert client.me().name == "bootstrap"


def test_a_local_stack_that_starts_its_api_again_is_waited_for(
    own_api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VCASGD_HOME", str(own_api.home))
    StackState(api_url=own_api.url).write(own_api.home)
    (own_api.home / "token").write_text(own_api.token)
    with StackHome(own_api.home).acquire(), Client() as client:
        job = client.job(own_api.submit())
        own_api.kill()
        with pytest.raises(ApiError, match="no answer") as caught:
            list(job.events(follow=True, patience=0.1))
        with ThreadPoolExecutor(1) as pool:
            jobs = pool.submit(client.jobs)
            own_api.start()
            assert [each.id for each in jobs.result(PATIENCE)] == [job.id]
    assert "the stack starts its API again" in (caught.value.remedy or "")
