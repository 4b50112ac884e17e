"""Listing and download of checkpoints and models, also of damaged ones."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from support.api_harness import Api, spec, zipped

import vcasgd
from vcasgd.client import Client
from vcasgd.errors import ApiError, CheckpointDamaged, Conflict, NotFound, SpecError
from vcasgd.learning.layout import Layout
from vcasgd.spec.sections import StartFrom
from vcasgd.storage.model_checkpoints import ModelCheckpoints
from vcasgd.store.ledger.job import JobState
from vcasgd.store.tensors.snapshot import Meta, Record, Snapshot


def test_checkpoints_are_listed_oldest_first(api: Api, client: Client) -> None:
    job = api.submit()
    second, _ = api.store_checkpoint(job, 20)
    first, data = api.store_checkpoint(job, 3)
    api.jobs.set_checkpoints(job, {first: {"version": 3, "at": 5.0, "finished_epochs": 1}})

    rows = client.job(job).checkpoints()

    assert [row.name for row in rows] == [first, second]
    assert (rows[0].version, rows[0].size) == (3, len(data))
    assert rows[0].digest == hashlib.sha256(data).hexdigest()
    assert (rows[0].at, rows[0].finished_epochs) == (5.0, 1)
    assert rows[1].at is None


def test_checkpoint_is_downloaded(api: Api, client: Client, tmp_path: Path) -> None:
    job = api.submit()
    # larger than one chunk
    name, data = api.store_checkpoint(job, 3, size=700_000)
    (tmp_path / "usual").touch()

    path = client.job(job).download(tmp_path / "model.safetensors", checkpoint=name)
    named = client.job(job).download(tmp_path, checkpoint=name)

    assert path.read_bytes() == data
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert load_file(path)["weight"][-1] == 699_999
    assert named == tmp_path / f"{job}-{name}"
    assert set(tmp_path.iterdir()) == {path, named, tmp_path / "usual"}
    for trained_only in (False, True):
        new = tmp_path / f"new-{trained_only}" / "folder" / "model.safetensors"
        client.job(job).download(new, checkpoint=name, trained_only=trained_only)
        assert new.read_bytes() == data


def test_damaged_checkpoint_returns_a_problem_with_its_name(
    api: Api, http: httpx.Client, client: Client, tmp_path: Path
) -> None:
    job = api.submit()
    name, data = api.store_checkpoint(job, 3)
    api.storage.put(f"jobs/{job}/checkpoints/{name}", data[:-1])

    answer = http.get(f"jobs/{job}/checkpoints/{name}")

    assert answer.status_code == 500
    assert name in answer.json()["detail"]
    assert f"vcasgd checkpoints {job}" in answer.json()["remedy"]
    with pytest.raises(CheckpointDamaged, match=name):
        client.job(job).download(tmp_path / "model", checkpoint=name)
    assert list(tmp_path.iterdir()) == []


def test_a_large_damaged_checkpoint_breaks_off(api: Api, client: Client, tmp_path: Path) -> None:
    job = api.submit()
    name, data = api.store_checkpoint(job, 3, size=5_000_000)  # several chunks
    api.storage.put(f"jobs/{job}/checkpoints/{name}", data[:-1] + b"x")

    with pytest.raises(ApiError, match="ended early") as caught:
        client.job(job).download(tmp_path / "model", checkpoint=name)
    assert "choose another checkpoint" in (caught.value.remedy or "")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_the_client_has_is_not_sent(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    name, data = api.store_checkpoint(job, 3)
    path = f"jobs/{job}/checkpoints/{name}"
    whole = http.get(path)
    tag = whole.headers["ETag"]
    assert (whole.content, tag) == (data, f'"{hashlib.sha256(data).hexdigest()}"')
    assert whole.headers["Content-Length"] == str(len(data))
    assert name in whole.headers["Content-Disposition"]

    for known in (tag, f'"other", {tag}', f"W/{tag}", "*"):
        answer = http.get(path, headers={"If-None-Match": known})
        assert (answer.status_code, answer.content, answer.headers["ETag"]) == (304, b"", tag)
    other = http.get(path, headers={"If-None-Match": '"other"', "Range": "bytes=0-3"})
    assert (other.status_code, other.content) == (200, data)
    assert other.headers["Accept-Ranges"] == "none"


def bytes_read(api: Api) -> int:
    return int(Path(f"/proc/{api.process.pid}/io").read_text().split()[1])


def test_large_checkpoint_is_read_once_and_sent_in_bounded_memory(
    own_api: Api, tmp_path: Path
) -> None:
    job = own_api.submit()
    small, _ = own_api.store_checkpoint(job, 2, size=4_000_000)
    name, data = own_api.store_checkpoint(job, 3, size=20_000_000)

    with own_api.client() as client:
        # what the API imports and keeps for its threads doesn't depend on the size
        client.job(job).download(tmp_path / "small", checkpoint=small)
        before, read = own_api.process.peak_bytes(), bytes_read(own_api)
        path = client.job(job).download(tmp_path / "model", checkpoint=name)

    assert path.stat().st_size == len(data)
    assert own_api.process.peak_bytes() - before < len(data) / 2
    assert bytes_read(own_api) - read < 1.5 * len(data)


@pytest.mark.parametrize("name", ["x", "7", "v1.safetensors", f"v{3:012d}-{'0' * 64}.safetensors"])
def test_unknown_checkpoint_is_not_found(
    api: Api, client: Client, tmp_path: Path, name: str
) -> None:
    job = api.submit()
    api.store_checkpoint(job, 1)
    with pytest.raises(NotFound, match="has no checkpoint") as caught:
        client.job(job).download(tmp_path / "model", checkpoint=name)
    assert f"vcasgd checkpoints {job} lists them" in (caught.value.remedy or "")


def test_failed_job_has_no_model_and_shows_the_reason(
    api: Api, client: Client, tmp_path: Path
) -> None:
    job = api.submit()
    api.finish(job, JobState.FAILED, traceback="boom in line 3")

    with pytest.raises(Conflict, match="ended without one: it failed") as caught:
        client.job(job).download(tmp_path / "model")
    assert caught.value.details["traceback"] == "boom in line 3"


def test_a_running_job_without_a_ranking_metric_has_only_a_last_model(
    api: Api, client: Client, tmp_path: Path
) -> None:
    job = api.submit()
    _, data = api.store_checkpoint(job, 1)
    found = client.job(job)

    assert found.download(tmp_path / "model", "last").read_bytes() == data
    with pytest.raises(Conflict, match="no metric of its evaluations ranks them") as caught:
        found.download(tmp_path / "model", "best")
    assert "stop.metric" in (caught.value.remedy or "")


def test_a_job_starts_from_a_checkpoint_of_another_one(api: Api, client: Client) -> None:
    job = api.submit(epochs=2)
    api.start_job(job)
    files = [api.store_checkpoint(job, epoch, size=epoch)[0] for epoch in (1, 2)]
    api.evaluate(job, 1, {"accuracy": 0.9})
    api.evaluate(job, 2, {"accuracy": 0.8})

    def started(source: str) -> StartFrom | None:
        return client.submit(spec(start_from=source), zipped()).spec.start_from

    assert started(job) == StartFrom(job=job, checkpoint=files[0])
    assert started(f"{job}/last") == StartFrom(job=job, checkpoint=files[1])
    assert started(f"{job}/{files[1]}") == StartFrom(job=job, checkpoint=files[1])
    for source, problem in (
        ("nothing-abc123", "start_from: there is no job .*takes the ID of a job, not its name"),
        (f"{job}/v1", "has no checkpoint v1"),
    ):
        with pytest.raises(SpecError, match=problem):
            started(source)


def test_an_ended_job_is_extended(api: Api, client: Client) -> None:
    job = client.submit(spec(max_steps=5, epochs=None), zipped()).id
    with pytest.raises(Conflict, match="no finished model"):
        client.job(job).extend(5)
    api.start_job(job)
    name, _ = api.store_checkpoint(job, 5)
    api.finish(job, model=name)

    more = client.job(job).extend(5)

    assert (more.spec.epochs, more.spec.max_steps) == (5, None)
    assert more.spec.start_from == StartFrom(job=job, checkpoint=name)
    assert more.package == client.job(job).package


def test_a_job_is_loaded_as_a_module_with_its_weights(
    api: Api, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VCASGD_CACHE_DIR", str(tmp_path))
    code = """
import torch, vcasgd

class Digits(vcasgd.Task):
    def model(self):
        return torch.nn.Linear(2, 1, bias=False)
"""
    job = client.submit(spec(), zipped(**{"train.py": code})).id
    layout = Layout.of(torch.nn.Linear(2, 1, bias=False))
    meta = Meta(version=1, token=1, floats=2, parameters=2, layout=layout.digest())
    stored = ModelCheckpoints(api.storage, job).write(
        (Snapshot(meta, Record()),), layout, lambda: iter([torch.tensor([3.0, 4.0])])
    )
    api.finish(job, model=stored.name)

    module = vcasgd.load(job, client=client)

    assert module(torch.ones(1, 2)).item() == 7.0
    assert not module.training
    with pytest.raises(Conflict, match=job):
        vcasgd.load("digits", client=client)
