"""Exports of a job's history to trackers, which can stop and continue at any point."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.api_harness import Api
from support.trackers import tensorboard_files
from support.waiting import PATIENCE, await_truth

from vcasgd.client import Client
from vcasgd.client.tracking.base import EVALUATIONS_NAMED, Position, new_points
from vcasgd.errors import SpecError
from vcasgd.schemas.history import MetricRow
from vcasgd.schemas.jobs import EvaluationView
from vcasgd.store.ledger.job import JobState


def add_point(api: Api, job: str, number: int) -> None:
    api.jobs.add_metrics(job, {"at": float(number), "version": 5 * number, "loss": 1 / number})


@pytest.fixture
def job(api: Api) -> str:
    """A job with three points of metrics, and an evaluation after the second one."""
    name = api.submit(args={"depth": 3})
    api.start_job(name)
    for number in (1, 2, 4):
        add_point(api, name, number)
    api.evaluate(name, 1, {"accuracy": 0.5, "top5": 0.75}, version=10, at=3.0)
    return name


def losses(folder: str) -> list[tuple[int, float, float]]:
    """Return step, time, and loss of each point in event files."""
    files = tensorboard_files(folder)
    return [
        (each.step, each.wall_time, each.tensor_proto.float_val[0])
        for each in files.Tensors("train/loss")
    ]


def test_position_in_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "position.json"
    assert Position.load(file) == Position()
    for number in (1, 2):
        Position().after_point(f"{number}-0").save(file)
    assert Position.load(file).point == "2-0"
    assert list(tmp_path.iterdir()) == [file]
    file.write_text('{"point": "2-')
    with pytest.raises(SpecError, match="is damaged") as caught:
        Position.load(file)
    assert "delete it" in (caught.value.remedy or "")


class TestTensorBoard:
    def test_an_export_has_everything_and_continues_where_the_last_one_ended(
        self, api: Api, client: Client, job: str, tmp_path: Path
    ) -> None:
        folder = client.job(job).track("tensorboard", folder=tmp_path)
        assert folder == str(tmp_path / job)
        assert losses(folder) == [(5, 1.0, 1.0), (10, 2.0, 0.5), (20, 4.0, 0.25)]
        (top5,) = tensorboard_files(folder).Tensors("validation/top5")
        assert (top5.step, top5.wall_time, top5.tensor_proto.float_val[0]) == (10, 3.0, 0.75)

        files = set(Path(folder).iterdir())
        assert client.job(job).track("tensorboard", folder=tmp_path) == folder
        assert set(Path(folder).iterdir()) == files, "there was nothing new"
        add_point(api, job, 5)
        client.job(job).track("tensorboard", folder=tmp_path)
        assert [step for step, _, _ in losses(folder)] == [5, 10, 20, 25]

    def test_what_was_written_after_the_recorded_position_is_removed(
        self, api: Api, client: Client, job: str, tmp_path: Path
    ) -> None:
        # Given an export that was killed after it wrote points, and before it wrote its position
        folder = client.job(job).track("tensorboard", folder=tmp_path)
        with _event_files(folder)[0].open("ab") as file:
            file.write(b"a part of a record")
        from tensorboard.summary import Writer

        writer = Writer(folder)
        writer.add_scalar("train/loss", 9.0, 25)
        writer.close()
        assert len(_event_files(folder)) == 2

        add_point(api, job, 5)
        client.job(job).track("tensorboard", folder=tmp_path)

        assert losses(folder)[2:] == [(20, 4.0, 0.25), (25, 5.0, pytest.approx(0.2))]

    @pytest.mark.ci
    def test_a_killed_command_repeats_no_point(
        self, api: Api, client: Client, job: str, tmp_path: Path
    ) -> None:
        # Given a command that follows the job
        argv = [sys.executable, "-m", "vcasgd.cli", "track", job, "--to", "tensorboard"]
        argv += ["--folder", str(tmp_path), "--url", api.url, "--token", api.token]
        process = subprocess.Popen([*argv, "--follow"], stdout=subprocess.DEVNULL)
        state = tmp_path / job / "vcasgd.json"
        try:
            await_truth(state.exists)
            before = state.read_bytes()
            add_point(api, job, 5)
            await_truth(lambda: state.read_bytes() != before)
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL, "the fault fired"

        # When it runs again, after the end of the job
        add_point(api, job, 6)
        api.finish(job)
        subprocess.run([*argv, "--follow"], check=True, timeout=PATIENCE, stdout=subprocess.DEVNULL)

        # Then each point is there once
        assert [step for step, _, _ in losses(str(tmp_path / job))] == [5, 10, 20, 25, 30]

    def test_a_missing_library_has_a_remedy(
        self, client: Client, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client.job(job).track("tensorboard", folder=tmp_path)
        monkeypatch.delitem(sys.modules, "vcasgd.client.tracking.to_tensorboard")
        monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
        with pytest.raises(SpecError) as caught:
            client.job(job).track("tensorboard", folder=tmp_path)
        assert caught.value.remedy == "pip install 'vcasgd[tensorboard]'"


def _event_files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*tfevents*"))


def test_an_unknown_tracker_is_refused(client: Client, job: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        client.job(job).track("notebook", folder=tmp_path)

    assert caught.value.remedy == "choose from tensorboard, mlflow, wandb, trackio"


def test_a_late_evaluation_is_exported_once_and_in_order() -> None:
    """Workers evaluate several models at a time, so results arrive in any order."""

    def row(number: int) -> MetricRow:
        return MetricRow(id=f"{number}-0", at=float(number), version=number, loss=1.0)

    def evaluated(version: int) -> EvaluationView:
        return EvaluationView(
            epoch=1, version=version, metrics={"a": 1.0}, worker="w", seconds=1, at=1
        )

    first = list(new_points([row(1), row(3)], [evaluated(3)], Position()))
    assert [each.step for each in first] == [1, 3, 3]
    second = list(new_points([row(4)], [evaluated(2), evaluated(3)], first[-1].position))
    assert [(each.step, "validation/a" in each.values) for each in second] == [
        (2, True),
        (4, False),
    ]
    assert second[-1].position == Position(point="4-0", evaluated=(2, 3))
    # And a long job's position stays small
    position = Position()
    for version in range(EVALUATIONS_NAMED + 50):
        position = position.after_evaluation(version)
    assert all(position.has_evaluation(version) for version in range(EVALUATIONS_NAMED + 50))
    assert not position.has_evaluation(EVALUATIONS_NAMED + 50)
    assert len(position.model_dump_json()) < 2000


@pytest.mark.extended
def test_mlflow_has_one_run_with_each_point_once(
    api: Api, client: Client, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="needs pip install 'vcasgd[mlflow]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    for number in (None, 5, 6):
        if number is not None:
            add_point(api, job, number)
        client.job(job).track("mlflow", project="mine")
    api.finish(job, JobState.SUCCEEDED)
    client.job(job).track("mlflow", project="mine")

    mlflow = MlflowClient()
    experiment = mlflow.get_experiment_by_name("mine")
    assert experiment is not None
    (run,) = mlflow.search_runs([experiment.experiment_id])
    assert run.info.run_name == job
    assert run.info.status == "FINISHED"
    assert run.data.params["args.depth"] == "3"
    history = mlflow.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.timestamp) for each in history] == [
        (5 * number, 1000 * number) for number in (1, 2, 4, 5, 6)
    ]
    (top5,) = mlflow.get_metric_history(run.info.run_id, "validation/top5")
    assert (top5.step, top5.value) == (10, 0.75)


@pytest.mark.extended
def test_wandb_gets_each_point_once(
    api: Api, client: Client, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="needs pip install 'vcasgd[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    for number in (None, 5):
        if number is not None:
            add_point(api, job, number)
        client.job(job).track("wandb", folder=tmp_path)
    client.job(job).track("wandb", folder=tmp_path)

    files = sorted(tmp_path.rglob("run-*.wandb"))
    assert [file.name for file in files] == [f"run-{job}.wandb"] * 2, "nothing new, no new run"
    rows = [row for file in files for row in wandb_history(file)]
    assert [row["progress/updates"] for row in rows if "train/loss" in row] == [5, 10, 20, 25]
    (evaluated,) = [row for row in rows if "validation/top5" in row]
    assert (evaluated["progress/updates"], evaluated["validation/top5"]) == (10, 0.75)


def wandb_history(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of an offline run.

    The file is a header and blocks of 32 KiB in LevelDB's log format. All records here fit in one.
    """
    from wandb.proto import wandb_internal_pb2

    data, at = path.read_bytes(), 7
    assert len(data) < 32768
    while at + 7 <= len(data):
        (size,) = struct.unpack_from("<H", data, at + 4)
        record = wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + size])
        at += 7 + size
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {
                each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in items
            }


@pytest.mark.extended
def test_trackio_gets_each_point_once(
    api: Api, client: Client, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio", reason="needs pip install 'vcasgd[trackio]'")

    client.job(job).track("trackio", folder=tmp_path)
    add_point(api, job, 5)
    for _ in range(2):
        client.job(job).track("trackio", folder=tmp_path)

    rows = trackio.SQLiteStorage.get_logs("vcasgd", job)
    assert [row["step"] for row in rows if "train/loss" in row] == [5, 10, 20, 25]
    assert [(row["step"], row["validation/top5"]) for row in rows if "validation/top5" in row] == [
        (10, 0.75)
    ]
