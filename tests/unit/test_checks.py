"""Checks of a job's files on the submitter's computer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vcasgd.errors import SpecError, TaskImportError
from vcasgd.spec.job import JobSpec
from vcasgd.task.package import check_files

TASK = "class Digits:\n    pass\n"


def spec(folder: Path, files: dict[str, str], **fields: Any) -> JobSpec:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    least = {"name": "a", "task": "train:Digits", "epochs": 1, "working_dir": str(folder)}
    return JobSpec.parse({**least, **fields})


@pytest.mark.parametrize(
    ("files", "fields", "field", "message"),
    [
        ({"train.py": TASK}, {"task": "trian:Digits"}, "task", "no module trian .*mean train?"),
        ({"train.py": TASK}, {"task": "train:Digit"}, "task", "has no Digit .*mean Digits?"),
        ({"train.py": TASK}, {"task": "tain.py"}, "task", "there is no tain.py .*mean train.py?"),
        ({"train.py": "Trainer().fit()", "vcasgd.md": ""}, {"task": "train.py"}, "task",
         "train.py has no vcasgd.Session"),
        ({"train.py": TASK}, {"requirements": "r.txt"}, "requirements", "there is no r.txt in"),
        ({"train.py": TASK, "r.txt": "", ".vcasgdignore": "*.txt"}, {"requirements": "r.txt"},
         "requirements", "r.txt is excluded by .vcasgdignore"),
        ({"train.py": TASK}, {"start_from": "w.safetensors"}, "start_from", "no w.safetensors in"),
        ({"train.py": TASK, "lib/a.py": ""}, {"task": "lib.b:X"}, "task", "no module lib.b in"),
    ],
)  # fmt: skip
def test_what_is_missing_or_misspelled_is_an_error(
    tmp_path: Path, files: dict[str, str], fields: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message.replace("?", r"\?")) as caught:
        check_files(spec(tmp_path, files, **fields))
    assert caught.value.details["field"] == field


def test_a_session_may_be_made_in_a_file_beside_the_script(tmp_path: Path) -> None:
    files = {"train.py": "import lib.loops", "lib/loops.py": "import vcasgd"}

    assert check_files(spec(tmp_path, files, task="train.py")) == []


def test_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(TaskImportError, match=r"train.py, line 2"):
        check_files(spec(tmp_path, {"train.py": "x = 1\nclass Digits\n"}))


def test_a_missing_library_is_a_warning_unless_the_job_installs_some(tmp_path: Path) -> None:
    train = "import os, torch, helpers\nfrom models import net\nimport absent_library\n" + TASK
    files = {"train.py": train, "helper.py": "", "models/net.py": "import gone\n", "r.txt": ""}

    warnings = check_files(spec(tmp_path, files))

    texts = {warning.message.split(",")[0]: warning.remedy for warning in warnings}
    assert texts.pop("train.py imports helpers") == "did you mean helper?"
    assert texts.keys() == {"train.py imports absent_library", "models/net.py imports gone"}
    assert check_files(spec(tmp_path, files, requirements="r.txt")) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.py", "from elsewhere import Digits\n"),
        ("train.py", "Digits = make()\n"),
        ("train.py", "try:\n    from a import Digits\nexcept ImportError:\n    Digits = None\n"),
        ("train.py", "from library import *\n"),
        ("train/__init__.py", TASK),
    ],
)
def test_a_class_is_found_in_a_package_or_comes_from_elsewhere(
    tmp_path: Path, name: str, text: str
) -> None:
    files = {name: text, "r.txt": ""}
    assert check_files(spec(tmp_path, files, requirements="r.txt")) == []
