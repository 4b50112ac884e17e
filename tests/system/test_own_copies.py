"""Deaths around workers that keep their own copies of a large model."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.counted_job import CountedJob, client_of
from support.stacks import kill_part
from support.waiting import await_truth

from vcasgd.chaos.audited_job import FINISH_SECONDS
from vcasgd.client import Client
from vcasgd.schemas.fleet import WorkerRow
from vcasgd.settings import Settings
from vcasgd.stack import StackHome

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]

#: Parameters whose exchange takes much longer than a local step.
PADDING, STEP_SECONDS = 20_000_000, 0.02
#: Pushes of a copy between two faults.
SEVERAL = 3


@pytest.mark.ci
def test_nothing_is_lost_when_parts_die_around_a_copy(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, workers=1)
    with client_of(settings) as client:
        # Given a worker that is alone
        job = job_of(client, tmp_path, workers=1, subtasks_per_epoch=2)

        kill_each(settings, job, lambda: Copying(client, job.id))
        assert job.finish().progress.samples_repeated == 0


@pytest.mark.parametrize("codec", [pytest.param("auto", marks=pytest.mark.ci), "int2"])
def test_nothing_is_lost_when_parts_die_while_workers_push_in_turn(
    tmp_path: Path, codec: str
) -> None:
    settings = settings_of(tmp_path, workers=2)
    with client_of(settings) as client:
        # Given two workers that push shards of a model in turn
        job = job_of(client, tmp_path, workers=2, subtasks_per_epoch=4, codec=codec)

        kill_each(settings, job, lambda: Taking(client, job.id))

        job.release()
        view = client.job(job.id).wait(FINISH_SECONDS)
        assert view.state == "succeeded", view.reason
        progress = view.progress
        assert progress.samples_applied == (progress.samples_expected or 0) > 0
        assert (progress.samples_repeated, progress.samples_lost) == (0, 0)


def settings_of(folder: Path, workers: int) -> Settings:
    return Settings(home=folder / "home", api_port=0, local_capacity=workers, heartbeat=0.5)


def job_of(
    client: Client, folder: Path, *, workers: int, subtasks_per_epoch: int, codec: str = "auto"
) -> CountedJob:
    return CountedJob(
        client, folder, epochs=20, step_seconds=STEP_SECONDS, padding=PADDING,
        update={"rule": "rounds", "codec": codec}, push_every=None, evaluate={"every": "1h"},
        subtasks_per_epoch=subtasks_per_epoch, workers={"min": workers, "max": workers},
    )  # fmt: skip


def kill_each(
    settings: Settings, job: CountedJob, find: Callable[[], Callable[[], WorkerRow | None]]
) -> None:
    """Kill a worker's process that ``find`` waits for, the parameter server, and the tensors
    server, one after the other."""
    for victim in ("worker", "server", "tensors"):
        row = await_truth(find())
        if victim == "worker":
            os.kill(row.pid, signal.SIGKILL)
        else:
            kill_part(StackHome(settings.home_path), victim)
        job.await_updates(1)


class Taking:
    """Finds one of two workers which have both pushed several updates of one shard."""

    def __init__(self, client: Client, job: str) -> None:
        self._client, self._job = client, job
        self._first: dict[int, int] = {}

    def __call__(self) -> WorkerRow | None:
        rows = self._client.job(self._job).workers()
        self._first = {
            row.pid: min(row.pushes, self._first.get(row.pid, row.pushes)) for row in rows
        }
        took = [row for row in rows if row.pushes >= self._first[row.pid] + SEVERAL]
        return took[0] if len(took) > 1 else None


class Copying:
    """Finds a worker that has pushed several updates and fetched nothing meanwhile."""

    def __init__(self, client: Client, job: str) -> None:
        self._client, self._job = client, job
        self._first: WorkerRow | None = None

    def __call__(self) -> WorkerRow | None:
        rows = self._client.job(self._job).workers()
        if not rows:
            return None
        row, first = rows[0], self._first
        if first is None or (first.pid, first.fetched_bytes) != (row.pid, row.fetched_bytes):
            self._first = first = row
        return row if row.pushes >= first.pushes + SEVERAL else None
