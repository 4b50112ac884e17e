"""Packages and setup commands of a job, installed by the real pip without a network."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE
from support.wheels import write_wheel

from vcasgd.errors import SetupFailed
from vcasgd.local_files import hold_lock
from vcasgd.spec.job import JobSpec
from vcasgd.worker import job_environment
from vcasgd.worker.job_environment import COMPLETE, JobEnvironment, run_command
from vcasgd.worker.leases import WorkInterrupted

PACKAGE = "0" * 64
OFFLINE = "--no-index\n--find-links wheels\n"


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    return folder


def environment(code: Path, cache: Path, requirements: str | None = None, **fields: Any) -> Any:
    if requirements is not None:
        (code / "requirements.txt").write_text(requirements)
        fields["requirements"] = "requirements.txt"
    spec = JobSpec.parse({"name": "a", "task": "t:T", "epochs": 1, **fields})
    return JobEnvironment(spec, PACKAGE, code, cache)


def nothing() -> None:
    """Progress that needs no report."""


def output_in(made: JobEnvironment, program: str) -> str:
    """Return what a new process prints that uses the environment as a worker does."""
    start = (
        "import sys; from pathlib import Path; from vcasgd.spec.job import JobSpec; "
        "from vcasgd.worker.job_environment import JobEnvironment; "
        "made = JobEnvironment.__new__(JobEnvironment); "
        f"made.folder, made._site, made._bin = map(Path, {made_paths(made)!r}); made.activate(); "
    )
    done = subprocess.run(
        [sys.executable, "-c", start + program],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return done.stdout


def made_paths(made: JobEnvironment) -> list[str]:
    return [str(each) for each in (made.folder, made._site, made._bin)]


def test_packages_are_installed_once_and_come_first(code: Path, tmp_path: Path) -> None:
    # Given a requirement, which depends on another wheel and on a package of the platform
    greeting = "import other; text = other.text"
    write_wheel(code / "wheels", "greeting", "1.0", greeting, "other", "torch")
    write_wheel(code / "wheels", "other", "2.0", "text = 'hello'")
    made = environment(code, tmp_path, f"{OFFLINE}greeting==1.0\n")

    made.prepare(nothing)

    # Then a process of the job finds both, and the platform's torch is not installed again
    program = "import greeting; print(greeting.text, sys.path[0])"
    assert output_in(made, program).split() == ["hello", str(made._site)]
    assert not (made._site / "torch").exists()
    # And another worker installs nothing
    at = (made.folder / COMPLETE).stat().st_mtime_ns
    environment(code, tmp_path, f"{OFFLINE}greeting==1.0\n").prepare(nothing)
    assert (made.folder / COMPLETE).stat().st_mtime_ns == at


def test_the_platforms_own_packages_are_not_replaced(code: Path, tmp_path: Path) -> None:
    write_wheel(code / "wheels", "torch", "1.0", "")
    made = environment(code, tmp_path, f"{OFFLINE}torch==1.0\n")

    with pytest.raises(SetupFailed, match="requirements: the command ended") as failed:
        made.prepare(nothing)

    assert "torch==1.0" in failed.value.traceback, "pip names the conflict"
    assert not (made.folder / COMPLETE).exists()


@pytest.mark.ci
def test_an_optional_package_can_have_another_version_for_a_job(code: Path, tmp_path: Path) -> None:
    """It is installed here, but the platform itself doesn't need it."""
    write_wheel(code / "wheels", "pandas", "0.1", "old = True")
    made = environment(code, tmp_path, f"{OFFLINE}pandas==0.1\n")

    made.prepare(nothing)

    assert output_in(made, "import pandas; print(pandas.old)") == "True\n"
    import pandas

    assert pandas.__version__ != "0.1", "the platform's is unchanged"


def test_a_package_that_is_imported_already_is_refused(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(code / "wheels", "pytest", "0.1", "")
    made = environment(code, tmp_path, f"{OFFLINE}pytest==0.1\n")
    made.prepare(nothing)
    before = list(sys.path)

    with pytest.raises(SetupFailed, match="pytest can't be installed for a job"):
        made.activate()

    assert sys.path == before


def test_setup_commands_run_once_in_the_jobs_environment(code: Path, tmp_path: Path) -> None:
    count = tmp_path / "count"
    commands = [f"echo $0 >> {count}", "cd /", f"pwd >> {count}", f"python -m pip list >> {count}"]

    for _ in range(2):
        made = environment(code, tmp_path, setup=commands)
        made.prepare(nothing)

    lines = count.read_text().splitlines()
    assert lines[:2] == ["sh", "/"], "one shell runs all commands"
    assert lines.count("/") == 1
    assert any(line.split()[:1] == ["torch"] for line in lines)


def test_a_failed_setup_command_shows_its_output(code: Path, tmp_path: Path) -> None:
    made = environment(code, tmp_path, setup=["echo before", "cat missing", "echo after"])

    with pytest.raises(SetupFailed, match="setup: the command ended with status 1") as failed:
        made.prepare(nothing)

    assert failed.value.traceback.splitlines()[0] == "before"
    assert "missing" in failed.value.traceback
    assert "after" not in failed.value.traceback


def test_another_content_gets_another_environment(code: Path, tmp_path: Path) -> None:
    first = environment(code, tmp_path, "a\n").folder
    assert environment(code, tmp_path, "a\n").folder == first
    assert environment(code, tmp_path, "b\n").folder != first
    assert environment(code, tmp_path, "a\n", setup="true").folder != first


def test_a_missing_requirements_file_is_named(code: Path, tmp_path: Path) -> None:
    spec = {"name": "a", "task": "t:T", "epochs": 1, "requirements": "no.txt"}

    with pytest.raises(SetupFailed, match=r"the job's package has no text file no\.txt"):
        JobEnvironment(JobSpec.parse(spec), PACKAGE, code, tmp_path)


def test_a_command_has_bounded_time(tmp_path: Path) -> None:
    argv = ["sh", "-c", "echo started; sleep 1000 & sleep 1000"]
    started = time.monotonic()

    with (tmp_path / "lock").open("w") as lock, pytest.raises(SetupFailed, match=r"more than 0 s"):
        run_command(argv, "setup", tmp_path, {}, 0.3, nothing, lock.fileno())

    assert time.monotonic() - started < PATIENCE


def test_a_worker_that_leaves_ends_its_command(tmp_path: Path) -> None:
    def leave() -> None:
        raise WorkInterrupted

    with (tmp_path / "lock").open("w") as lock, pytest.raises(WorkInterrupted):
        run_command(["sleep", "60"], "setup", tmp_path, {}, 60, leave, lock.fileno())


def test_one_worker_prepares_while_the_others_wait(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_environment, "LOCK_SECONDS", 0.5)
    made = environment(code, tmp_path, setup="true")
    lock, waits = made.folder.with_suffix(".lock"), list[None]()

    with hold_lock(lock, 1), pytest.raises(SetupFailed, match="another process holds"):
        made.prepare(lambda: waits.append(None))

    assert waits
    made.prepare(nothing)
    assert (made.folder / COMPLETE).exists()
