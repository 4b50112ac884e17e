"""Tasks: defaults, loading, and errors of user code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import vcasgd
from vcasgd.errors import TaskImportError
from vcasgd.task import task as task_module
from vcasgd.task.task import calling_user_code, load_task, variables_of

SOURCE = """
import vcasgd
import helper

class Job(vcasgd.Task):
    def __init__(self, depth=1):
        self.depth = depth
        self.helper = helper.NAME

class Plain:
    pass
"""


@pytest.fixture(autouse=True)
def restored_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(task_module, "_directories", set())
    yield
    for name in ("job_of_test", "helper"):
        sys.modules.pop(name, None)


def working_dir(path: Path, helper: str = "helper", source: str = SOURCE) -> Path:
    path.mkdir(exist_ok=True)
    (path / "job_of_test.py").write_text(source)
    (path / "helper.py").write_text(f"NAME = {helper!r}\n")
    return path


def test_task_is_constructed_with_its_arguments(tmp_path: Path) -> None:
    task = load_task("job_of_test:Job", {"depth": 20}, working_dir(tmp_path))

    assert isinstance(task, vcasgd.Task)
    assert vars(task) == {"depth": 20, "helper": "helper"}


def test_two_jobs_can_have_files_with_the_same_name(tmp_path: Path) -> None:
    first = working_dir(tmp_path / "first", "one")
    second = working_dir(tmp_path / "second", "two")

    helpers = [vars(load_task("job_of_test:Job", {}, d))["helper"] for d in (first, second, first)]

    assert helpers == ["one", "two", "one"]


def test_repository_of_this_package_can_be_a_working_directory(tmp_path: Path) -> None:
    site_packages = Path(torch.__file__).parents[1]
    repository = Path(vcasgd.__file__).parents[1]
    task_module._directories.update({repository, site_packages.parent})

    load_task("job_of_test:Job", {}, working_dir(tmp_path))

    assert sys.modules["vcasgd"] is vcasgd
    assert sys.modules["torch"] is torch


@pytest.mark.parametrize(
    ("entry", "args", "source", "message"),
    [
        ("missing_module:Job", {}, "", "ModuleNotFoundError: No module named 'missing_module'"),
        ("job_of_test:Missing", {}, "", "has no attribute 'Missing'"),
        ("job_of_test:Job", {"width": 1}, SOURCE, "unexpected keyword argument 'width'"),
        ("job_of_test:Job", {}, "import nowhere_to_be_found", "No module named 'nowhere_to"),
        ("job_of_test:Job", {}, "def broken(:", "SyntaxError: invalid syntax"),
        ("job_of_test:Job", {}, "raise SystemExit(3)", "SystemExit: 3"),
        ("job_of_test:Plain", {}, SOURCE, r"is a Plain, not a vcasgd.Task \(make the class"),
    ],
)
def test_load_error_names_the_reason(
    tmp_path: Path, entry: str, args: dict[str, object], source: str, message: str
) -> None:
    with pytest.raises(TaskImportError, match=message) as caught:
        load_task(entry, args, working_dir(tmp_path, source=source))
    assert caught.value.details["field"] == "task"


def test_interrupt_is_not_wrapped(tmp_path: Path) -> None:
    directory = working_dir(tmp_path, source="raise KeyboardInterrupt")

    with pytest.raises(KeyboardInterrupt):
        load_task("job_of_test:Job", {}, directory)


def test_traceback_starts_in_the_users_file(tmp_path: Path) -> None:
    source = "def work():\n    return 1 / 0\n\nwork()\n"

    with pytest.raises(TaskImportError) as caught:
        load_task("job_of_test:Job", {}, working_dir(tmp_path, source=source))

    trace = caught.value.traceback
    assert f'{tmp_path}/job_of_test.py", line 4' in trace
    assert f'{tmp_path}/job_of_test.py", line 2, in work' in trace
    assert trace.endswith("ZeroDivisionError: division by zero\n")
    assert "vcasgd/task/task.py" not in trace


def test_error_in_a_method_names_the_method() -> None:
    error = calling_user_code("loss", ValueError("too large"))

    assert str(error) == "loss raised ValueError: too large"
    # And of an exception without a text, its name
    assert str(calling_user_code("loss", NotImplementedError())).endswith("NotImplementedError")


def test_objects_of_one_class_have_names_of_their_own() -> None:
    found = variables_of([[1], {}, [2]])

    assert {name: read() for name, read in found.items()} == {"list": [1], "dict": {}, "list2": [2]}
