"""Deaths of the processes of a worker that trains with several."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.counted_job import CountedJob, client_of

from vcasgd.schemas.fleet import WorkerRow
from vcasgd.settings import Settings

TASKS = Path(__file__).parents[1] / "support" / "tasks"
RANKS = 3
Eventually = Callable[..., Any]


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.ci
@pytest.mark.timeout(600)
def test_nothing_is_lost_when_ranks_die(tmp_path: Path, eventually: Eventually) -> None:
    settings = Settings(home=tmp_path / "home", api_port=0, local_capacity=2)
    with client_of(settings) as client:
        # Given a job on two machines, each of which is a worker of three processes
        job = CountedJob(
            client, tmp_path, epochs=3, working_dir=str(TASKS), task="counted_mean:CountedMean",
            args={"samples": 1024, "batch_size": 8}, subtasks_per_epoch=16, push_every=2,
            workers={"min": 2, "max": 2, "gpus": RANKS},
        )  # fmt: skip

        # When a further process, the last one, and the first one of a worker die
        for victim in (1, 2, 0):
            row = eventually(lambda: training(client.job(job.id).workers()), timeout=120)
            pid = [row.pid, *further(row.pid)][victim]
            os.kill(pid, signal.SIGKILL)
            eventually(lambda pid=pid: not psutil.pid_exists(pid))
            job.await_updates(3, eventually)

        # Then every sample was applied exactly once in each epoch
        view = job.finish()
        assert view.progress.samples_repeated == 0
    assert not [one for one in psutil.process_iter(["cmdline"]) if is_rank(one)]


def training(rows: list[WorkerRow]) -> WorkerRow | None:
    """Return a worker with all of its processes."""
    complete = (row for row in rows if row.pid and len(further(row.pid)) == RANKS - 1)
    return next(complete, None)


def further(pid: int) -> list[int]:
    try:
        return [one.pid for one in psutil.Process(pid).children() if is_rank(one)]
    except psutil.NoSuchProcess:
        return []


def is_rank(process: psutil.Process) -> bool:
    try:
        return "vcasgd.worker.rank" in process.cmdline()
    except psutil.Error:
        return False
