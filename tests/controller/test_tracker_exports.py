"""The controller's exports to trackers, with a real API and real processes that are killed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.api_harness import Api
from support.processes import read_each
from support.trackers import tensorboard_files
from support.waiting import PATIENCE, await_truth

from vcasgd.controller import tracker_exports
from vcasgd.controller.tracker_exports import TrackerExports, read_variables
from vcasgd.errors import SpecError
from vcasgd.settings import Settings
from vcasgd.spec.access import TRACKERS, Scope
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger import api_tokens
from vcasgd.store.ledger.api_tokens import ApiTokens
from vcasgd.store.ledger.job import JobState

KEY = "a-secret-key-of-the-tracker"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOOK_SECONDS": 0.05, "FIRST_PAUSE": 0.5, "MAX_PAUSE": 20.0}.items():
        monkeypatch.setattr(tracker_exports, name, value)


@contextmanager
def exporting(
    api: Api, home: Path, file: Path | None = None, sure: Callable[[], bool] = lambda: True
) -> Iterator[TrackerExports]:
    settings = Settings(home=home, api_url=api.url, tracker_env=file)
    exports = TrackerExports(settings, api.connection, sure)
    exports.start()
    try:
        yield exports
    finally:
        exports.stop()
        exports.join(PATIENCE)
        assert not exports.is_alive()
        assert not processes(""), "none outlives the controller"


def processes(job: str) -> list[psutil.Process]:
    """Return the processes that export a job."""
    lines = read_each(psutil.Process().children(), lambda child: (child, child.cmdline()))
    return [child for child, line in lines if "track" in line and job in " ".join(line)]


def steps(folder: Path) -> list[int]:
    if not folder.exists():
        return []
    files = tensorboard_files(folder)
    if "train/loss" not in files.Tags()["tensors"]:
        return []
    return [each.step for each in files.Tensors("train/loss")]


def add_point(api: Api, job: str, number: int) -> None:
    api.jobs.add_metrics(job, {"at": float(number), "version": 5 * number, "loss": 1 / number})


@pytest.mark.slow
@pytest.mark.ci
def test_exports_continue_after_kills_and_disturb_no_other_job(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a controller with the credentials of a cloud
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-cloud")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # and two jobs, one of which can't be exported, and credentials in a file
    file = tmp_path / "trackers"
    file.write_text(f"# of W&B\nWANDB_API_KEY={KEY}\n")
    job, failing = (api.submit(track=[{"to": "tensorboard"}]) for _ in range(2))
    runs = tmp_path / "home" / "runs"
    (runs / failing).mkdir(parents=True)
    (runs / failing / "vcasgd.json").write_text("{")
    for each in (job, failing):
        api.start_job(each)
        add_point(api, each, 1)
    api.connection.hset(
        f"vcasgd:{{fleet}}:job:{job}:workers", "w-1", '{"cpu_percent":50.0,"resident_bytes":1000}'
    )

    with exporting(api, tmp_path / "home", file):
        await_truth(lambda: steps(runs / job) == [5])
        # Then a process has the trackers' credentials, and of ours a token that only reads
        (process,) = await_truth(lambda: processes(job))
        variables = process.environ()
        assert variables["WANDB_API_KEY"] == KEY
        assert variables["HTTPS_PROXY"] == "http://proxy.example"
        assert "AWS_SECRET_ACCESS_KEY" not in variables
        own = {name for name in variables if name.startswith("VCASGD_")} - {"VCASGD_MACHINE_ID"}
        assert own == {"VCASGD_API_URL", "VCASGD_TOKEN"}
        token = ApiTokens(api.connection).all()[TRACKERS]
        assert token.opened_by(variables["VCASGD_TOKEN"])
        assert token.scope is Scope.READ

        # When it is killed, and later the controller with all processes
        process.send_signal(signal.SIGKILL)
        (successor,) = await_truth(lambda: processes(job) if process not in processes(job) else [])
        assert successor.pid != process.pid, "the fault fired"
        add_point(api, job, 2)
        await_truth(lambda: steps(runs / job) == [5, 10])
        await_truth(lambda: "tracker-failed" in kinds(api, failing))
    add_point(api, job, 3)
    api.finish(job, JobState.SUCCEEDED)
    with exporting(api, tmp_path / "home", file):
        await_truth(lambda: api.jobs.exported(job) == {"tensorboard"})

        # Then each point is there once, and the failing export is named in its own job only
        assert steps(runs / job) == [5, 10, 15]
        assert not processes(job)
    files = tensorboard_files(runs / job)
    assert {"system/w-1/cpu_percent", "system/w-1/memory_bytes"} <= set(files.Tags()["tensors"])
    assert "tracker-failed" not in kinds(api, job)
    texts = [str(each["text"]) for each in api.jobs.events(failing, "0", limit=100)]
    assert any("export to tensorboard failed" in each and "damaged" in each for each in texts)
    assert not any(KEY in each for each in texts)
    assert api.jobs.get(failing).state is JobState.RUNNING


def kinds(api: Api, job: str) -> list[str]:
    return [str(each["kind"]) for each in api.jobs.events(job, "0", limit=100)]


@pytest.mark.ci
def test_the_export_of_a_job_that_has_many_newer_ones_is_completed(
    api: Api, tmp_path: Path
) -> None:
    first = api.submit(track=[{"to": "tensorboard"}])
    for _ in range(150):
        api.submit()
    add_point(api, first, 1)
    api.finish(first)

    with exporting(api, tmp_path):
        await_truth(lambda: api.jobs.exported(first) == {"tensorboard"})


def test_only_the_leader_exports(api: Api, tmp_path: Path) -> None:
    job, leads = api.submit(track=[{"to": "tensorboard"}]), [True]
    with exporting(api, tmp_path, sure=lambda: leads[0]):
        await_truth(lambda: processes(job))
        leads[0] = False
        await_truth(lambda: not processes(job))


def test_an_export_waits_for_a_valid_file_with_variables(api: Api, tmp_path: Path) -> None:
    job, file = api.submit(track=[{"to": "tensorboard"}]), tmp_path / "trackers"
    with exporting(api, tmp_path / "home", file):
        await_truth(lambda: "tracker-failed" in kinds(api, job))
        file.write_text("A=1\n")
        await_truth(lambda: processes(job))
    texts = [str(each["text"]) for each in api.jobs.events(job, "0", limit=100)]
    assert any("VCASGD_TRACKER_ENV: " in each for each in texts)


def test_an_export_waits_for_room_for_its_token(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_tokens, "MAX_TOKENS", 0)
    job = api.submit(track=[{"to": "tensorboard"}])
    with exporting(api, tmp_path):
        await_truth(lambda: "tracker-failed" in kinds(api, job))
        monkeypatch.undo()
        await_truth(lambda: processes(job))


def test_an_invalid_file_with_variables_is_refused_without_its_content(tmp_path: Path) -> None:
    file = tmp_path / "trackers"
    file.write_text(f"A=1\n{KEY}\n")
    with pytest.raises(SpecError, match=r"line 2 of .* is not of the form NAME=value") as caught:
        read_variables(file)
    assert KEY not in str(caught.value)
    file.write_bytes(b"A=\xff\n")
    with pytest.raises(SpecError, match="VCASGD_TRACKER_ENV: "):
        read_variables(file)


def test_a_tracker_is_there_once() -> None:
    with pytest.raises(SpecError, match="mlflow is there twice"):
        JobSpec.parse(
            {"name": "a", "task": "a:B", "epochs": 1, "track": [{"to": "mlflow"}, {"to": "mlflow"}]}
        )
