"""Machines that commands of a user launch, on a whole stack."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.counted_job import CountedJob, training_machines
from support.joinable_stack import launching_stack
from support.provider_backends import exec_machines, exec_pool
from support.waiting import await_truth

from vcasgd.client import Client

POOL = "any"
MACHINES = 2


@dataclass
class ExecStack:
    """A stack whose only pool has machines that are processes of a script."""

    client: Client
    folder: Path

    def alive(self) -> list[str]:
        return [row["name"] for row in exec_machines() if row["state"] != "gone"]

    def pid(self, machine: str) -> int:
        return int(json.loads((self.folder / machine).read_text())["pid"])

    def trains(self) -> list[str]:
        """Return the machines once all train."""
        alive = self.alive()
        return alive if len(alive) == training_machines(self.client) == MACHINES else []


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[ExecStack]:
    folder = tmp_path / "cloud"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("CLOUD_FOLDER", str(folder))
        patch.setenv("VCASGD_HOME", str(folder))
        pool = exec_pool(POOL, folder, max_machines=MACHINES)
        with launching_stack(tmp_path, pool) as (_, client, token):
            (folder / "token").write_text(token)
            yield ExecStack(client, folder)
        assert all(row["state"] == "gone" for row in exec_machines()), (
            "`down` left a machine behind"
        )


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.ci
def test_lost_and_evicted_machines_are_replaced_and_no_sample_is_lost(
    stack: ExecStack, tmp_path: Path
) -> None:
    # Given a job on all machines of the pool
    job = CountedJob(stack.client, tmp_path, epochs=20, workers={"min": 1, "max": MACHINES})
    first, second = await_truth(stack.trains)

    # When one is lost, and another one gets a notice
    os.killpg(stack.pid(first), signal.SIGKILL)
    await_truth(lambda: first not in (there := stack.trains()) and there)
    stack.client.evict(machine=second)
    await_truth(lambda: second not in (there := stack.trains()) and there)
    assert "evicted" in (stack.folder / f"{second}.log").read_text()

    # Then others take their places, all samples count once, and idle machines are ended
    view = job.finish()
    assert view.progress.samples_repeated == 0
    await_truth(lambda: not stack.alive())
