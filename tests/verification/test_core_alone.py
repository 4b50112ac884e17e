"""The core without the folder: no hook is filled, and jobs train."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import Harness
from support.waiting import await_truth

import vcasgd


@pytest.mark.ci
def test_the_core_trains_without_this_package(harness: Harness, tmp_path: Path) -> None:
    # Given a copy of vcasgd in which the folder is deleted
    copy = tmp_path / "vcasgd"
    ignored = shutil.ignore_patterns("verification", "static", "__pycache__")
    shutil.copytree(Path(vcasgd.__file__).parent, copy, ignore=ignored)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "PYTHONSAFEPATH": "1"}
    program = [sys.executable, "-c", "import vcasgd.verification"]
    gone = subprocess.run(program, env=env, check=False)
    assert gone.returncode == 1

    # When its parameter server and its workers train, of which one is a volunteer's
    job = harness.submit_audit(samples=400, epochs=2)
    harness.start_server(fresh_env=env)
    harness.start_job_loop(fresh_env=env)
    harness.start_worker(job, fresh_env=env)
    harness.start_worker(job, fresh_env=env, env={"VCASGD_VOLUNTEER": "true"})

    # Then each sample is applied once in each epoch
    await_truth(lambda: harness.jobs.get(job).state.over)
    done = harness.jobs.get(job)
    assert done.model is not None, done.reason
    assert set(harness.checkpoints(job).read(done.model).floats.tolist()) == {2.0}
