"""Deaths around workers that keep their own copies of a large model."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.counted_job import CountedJob, client_of
from support.waiting import await_truth

from vcasgd.chaos.audited_job import FINISH_SECONDS
from vcasgd.client import Client
from vcasgd.fleet.providers.local.processes import kill_all
from vcasgd.schemas.fleet import WorkerRow
from vcasgd.settings import Settings
from vcasgd.stack import StackHome, StackState
from vcasgd.stack.parts import mark

#: Parameters whose exchange takes much longer than a local step.
PADDING, STEP_SECONDS = 20_000_000, 0.02
#: Pushes of a copy between two faults.
SEVERAL = 3


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.ci
@pytest.mark.timeout(1800)
def test_nothing_is_lost_when_parts_die_around_a_copy(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", api_port=0, local_capacity=1, heartbeat=0.5)
    with client_of(settings) as client:
        # Given a worker that is alone
        job = CountedJob(
            client, tmp_path, epochs=20, step_seconds=STEP_SECONDS, padding=PADDING,
            update={"rule": "rounds"}, push_every=None, subtasks_per_epoch=2,
            workers={"min": 1, "max": 1}, evaluate={"every": "1h"},
        )  # fmt: skip

        # When the worker's process, the parameter server, and the tensors server die while it
        # pushes without fetching
        for victim in ("worker", "server", "tensors"):
            row = await_truth(Copying(client, job.id))
            if victim == "worker":
                os.kill(row.pid, signal.SIGKILL)
            else:
                kill(settings, victim)
            job.await_updates(1)

        # Then every sample was applied exactly once in each epoch
        view = job.finish()
        assert view.progress.samples_repeated == 0


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("codec", [pytest.param("auto", marks=pytest.mark.ci), "int2"])
def test_nothing_is_lost_when_parts_die_while_workers_push_in_turn(
    tmp_path: Path, codec: str
) -> None:
    settings = Settings(home=tmp_path / "home", api_port=0, local_capacity=2, heartbeat=0.5)
    with client_of(settings) as client:
        # Given two workers that push shards of a model in turn
        job = CountedJob(
            client, tmp_path, epochs=20, step_seconds=STEP_SECONDS, padding=PADDING,
            update={"rule": "rounds", "codec": codec}, push_every=None,
            subtasks_per_epoch=4,
            workers={"min": 2, "max": 2}, evaluate={"every": "1h"},
        )  # fmt: skip

        # When one's process, the parameter server, and the tensors server die while both push
        for victim in ("worker", "server", "tensors"):
            row = await_truth(Taking(client, job.id))
            if victim == "worker":
                os.kill(row.pid, signal.SIGKILL)
            else:
                kill(settings, victim)
            job.await_updates(1)

        # Then the record has every sample exactly once in each epoch
        job.release()
        view = client.job(job.id).wait(FINISH_SECONDS)
        assert view.state == "succeeded", view.reason
        progress = view.progress
        assert progress.samples_applied == (progress.samples_expected or 0) > 0
        assert (progress.samples_repeated, progress.samples_lost) == (0, 0)


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


def kill(settings: Settings, part: str) -> None:
    """Kill a part of the stack with SIGKILL. Fails if it was not alive."""
    home = StackHome(settings.home_path)
    process = StackState.read(home.path).parts[part].process
    assert process is not None
    assert process.alive()
    assert kill_all(mark(home, part), process)
