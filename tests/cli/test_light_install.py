"""An installation without extras, so without torch: clients work, other commands say why not."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.api_harness import Api

from vcasgd.stack.control import EXTRA, MODULES

ROOT = Path(__file__).parents[2]
#: Imports of these modules fail as if they were not installed.
BLOCKER = f"import sys\nsys.modules.update(dict.fromkeys({(*MODULES, 'torch')}))\n"


FOR_A_STACK = ("up", "up --foreground", "demo", "chaos audit")
#: Runs each command, and prints its exit status.
ALL_OF = """
import sys
from vcasgd.cli import main

for command in sys.argv[1:]:
    sys.argv = ["vcasgd", *command.split()]
    try:
        main()
    except SystemExit as ended:
        print("ended with", ended.code)
"""


def run(home: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run an interpreter in an installation without the libraries of a stack."""
    (home / "blocker").mkdir(exist_ok=True)
    (home / "blocker/sitecustomize.py").write_text(BLOCKER)
    own = {name: value for name, value in os.environ.items() if not name.startswith("VCASGD_")}
    paths = os.pathsep.join([str(home / "blocker"), str(ROOT)])
    return subprocess.run(
        [sys.executable, *words],
        env={**own, "PYTHONPATH": paths, "VCASGD_HOME": str(home / "home"), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_commands_for_a_stack_name_the_remedy(tmp_path: Path) -> None:
    done = run(tmp_path, "-c", ALL_OF, *FOR_A_STACK)

    assert done.stdout.count("ended with 1\n") == len(FOR_A_STACK)
    assert done.stderr.splitlines() == len(FOR_A_STACK) * [
        "error: this needs the libraries of a stack, and some are not installed: "
        + ", ".join(MODULES),
        "remedy: pip install 'vcasgd[stack]'",
    ]
    assert not (tmp_path / "home").exists(), "they changed nothing"


def test_commands_that_train_name_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("{name: digits, task: 'train:Digits', epochs: 1}")
    (tmp_path / "train.py").write_text("import vcasgd\nclass Digits(vcasgd.Task): ...")

    done = run(tmp_path, "-c", ALL_OF, f"simulate {tmp_path / 'job.yaml'}", "data index /nowhere")
    bare = run(tmp_path, "-c", "import vcasgd; vcasgd.Task")

    assert done.stdout.count("ended with 1\n") == 2
    assert done.stderr.count("remedy: pip install 'vcasgd[worker]'") == 2
    assert "vcasgd.Task needs torch: pip install 'vcasgd[worker]'" in bare.stderr


@pytest.mark.ci
def test_commands_for_an_api_work(api: Api, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("{name: digits, task: 'train:Digits', epochs: 1, workers: {pools: [local]}}")
    (tmp_path / "train.py").write_text("class Digits: ...")
    where = {"VCASGD_API_URL": api.url, "VCASGD_TOKEN": api.token}

    for command in ("submit job.yaml --yes", "jobs", "workers", "pools", "status", "doctor"):
        words = command.replace("job.yaml", str(job)).split()
        done = run(tmp_path, "-m", "vcasgd.cli", *words, **where)
        if command == "doctor":
            assert "remedy: to run a stack on this machine, pip install 'vcasgd[stack]'" in (
                done.stdout
            )
        assert "Traceback" not in done.stderr
        assert done.returncode == 0 or command == "doctor", done.stderr


def test_modules_are_those_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {_name(each) for each in extras[EXTRA]} - {"vcasgd"}
    distributions = packages_distributions()

    assert {canonicalize_name(distributions[name][0]) for name in MODULES} == wanted
    assert wanted.isdisjoint(_name(each) for each in project["dependencies"])
    assert "vcasgd[worker]" in extras[EXTRA]
    assert [_name(each) for each in extras["worker"]] == ["torch"]


def _name(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)
