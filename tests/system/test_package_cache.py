"""Code on a machine that other users have accounts on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.children import Process
from support.harness import Harness
from support.training import TASKS, Training
from support.waiting import await_truth

_PLANTED = "import pathlib\npathlib.Path({marker!r}).touch()\nfrom original import *\n"


def plant(cache: Path, digest: str, marker: Path) -> None:
    folder = cache / digest
    folder.mkdir(parents=True)
    for source in TASKS.glob("*.py"):
        (folder / source.name).write_text(source.read_text())
    (folder / "original.py").write_text((TASKS / "traced.py").read_text())
    (folder / "traced.py").write_text(_PLANTED.format(marker=str(marker)))


@pytest.mark.parametrize("place", [pytest.param("temporary folder", marks=pytest.mark.ci), "home"])
def test_code_that_another_user_left_is_not_run(
    harness: Harness, tmp_path: Path, place: str
) -> None:
    # Given a job, whose package another user of the worker's machine puts where workers unpack it
    training = Training(harness, samples=40, epochs=1)
    temporary, home, marker = (tmp_path / name for name in ("temporary", "home", "marker"))
    temporary.mkdir()
    home.mkdir(mode=0o755)
    shared = temporary if place == "temporary folder" else home / ".cache"
    shared.mkdir(exist_ok=True)
    shared.chmod(0o777)
    cache = f"vcasgd-packages-{os.getuid()}" if shared == temporary else "vcasgd/packages"
    plant(shared / cache, harness.jobs.get(training.job).package, marker)

    places = {"VCASGD_CACHE_DIR": "", "TMPDIR": str(temporary), "HOME": str(home)}
    argv = ["--job", training.job, "--worker", "worker-1"]
    worker = Process(
        [sys.executable, "-m", "vcasgd.worker.main", *argv],
        harness.home / "worker-1.log",
        {**harness.env, **places},
    )
    try:
        harness.start_servers()
        harness.start_job_loop()
        training.release()
        await_truth(lambda: harness.jobs.get(training.job).state.over)
    finally:
        worker.end()

    training.await_success()
    assert not marker.exists()
