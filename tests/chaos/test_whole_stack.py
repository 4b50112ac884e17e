"""Faults that need a whole stack: Ray, machines, the controller, the API.

All tests share one stack, and those that kill parts of it share one job, which trains until the
last of them. Its model must then count every sample exactly once in each epoch.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import pytest
from support.counted_job import HELD_SECONDS, CountedJob
from support.stacks import kill_part
from support.waiting import await_truth

from vcasgd.client import Client
from vcasgd.fleet.pools import LocalPoolSpec
from vcasgd.fleet.providers.local.provider import LocalProvider
from vcasgd.schemas.fleet import WorkerRow
from vcasgd.settings import Settings
from vcasgd.stack import StackHome, StackState, down, running, up

pytestmark = pytest.mark.slow

WORKERS = 3
#: Epochs of the job that all faults hit: 15 minutes while it is held up, seconds afterwards.
EPOCHS = 14
#: Updates after which a fault has shown what it does.
SEVERAL = 6
#: Secrets of the platform that no machine has.
SECRETS = ("ledger", "tensors", "jobs", "job-secrets")


class Stack:
    """A running stack, with the methods that tests need to disturb it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.home = StackHome(settings.home_path)
        self.provider = LocalProvider(
            self.home.path,
            settings.cluster,
            LocalPoolSpec(name="local", provider="local", max_machines=WORKERS),
        )

    @property
    def state(self) -> StackState:
        return StackState.read(self.home.path)

    @cached_property
    def client(self) -> Client:
        return Client(self.state.api_url, self.home.token())

    def close(self) -> None:
        self.client.close()

    def training_workers(self, job: str, but: Collection[str] = ()) -> dict[str, WorkerRow]:
        """Return the heartbeats of all workers, by machine, once as many train as there can be.

        Machines in ``but`` do not count.
        """

        def all_train() -> dict[str, WorkerRow] | None:
            heartbeats = {
                name: beat for name, beat in self.heartbeats(job).items() if name not in but
            }
            return heartbeats if len(heartbeats) == WORKERS else None

        return await_truth(all_train) or {}

    def await_updates(self, job: str) -> None:
        before = self.updates(job)
        await_truth(lambda: self.updates(job) > before + SEVERAL)

    def heartbeats(self, job: str) -> dict[str, WorkerRow]:
        """Return the heartbeats of workers that train now, by machine."""
        rows = self.client.job(job).workers()
        fresh = time.time() - 4 * self.settings.heartbeat
        return {row.machine or "": row for row in rows if (row.at or 0.0) > fresh and row.steps}

    def updates(self, job: str) -> int:
        return self.client.job(job).totals.updates


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("stack") / "home"
    settings = Settings(home=home, api_port=0, local_capacity=WORKERS, idle_seconds=300.0)
    with running(settings):
        stack = Stack(settings)
        yield stack
        stack.close()


@pytest.fixture(scope="module")
def shared_job(stack: Stack) -> Iterator[str]:
    """A job that trains on three machines until this fixture finishes it."""
    job = CountedJob(
        stack.client,
        stack.home.path.parent,
        EPOCHS,
        step_seconds=HELD_SECONDS,
        # More than the pool has, so that a full pool does not delay a replacement.
        workers={"min": 1, "max": WORKERS + 1},
        checkpoint={"every": "1h"},
    )
    yield job.id
    # Its model counts every sample exactly once in each epoch.
    assert job.finish().progress.samples_repeated == 0


@pytest.fixture
def job(stack: Stack, shared_job: str) -> str:
    """The shared job, with all of its workers in the middle of training."""
    stack.training_workers(shared_job)
    stack.await_updates(shared_job)
    return shared_job


@pytest.mark.ci
def test_no_machine_holds_server_passwords(stack: Stack, job: str) -> None:
    private = {stack.home.ensure_password(name) for name in SECRETS}
    for machine in stack.training_workers(job):
        files = [Path(f"/proc/{each.pid}/environ") for each in stack.provider.processes(machine)]
        files += (stack.home.path / "machines" / machine).rglob("*")
        read = {path: _text(path) for path in files if path.is_file()}
        assert sum(map(bool, read.values())) > 2
        assert not [path for path, text in read.items() for each in private if each in text]


def _text(path: Path) -> str:
    """Return the content, or nothing if the process or the file is gone."""
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


@pytest.mark.ci
def test_three_of_three_workers_die_at_once(stack: Stack, job: str) -> None:
    victims, kills = set(stack.training_workers(job)), stack.client.job(job).kills

    for victim in victims:
        stack.provider.kill(victim)

    assert not any(stack.provider.processes(victim) for victim in victims), "the faults fired"
    stack.training_workers(job, but=victims)
    await_truth(lambda: stack.client.job(job).kills >= kills + WORKERS)


@pytest.mark.ci
def test_workers_continue_while_the_ray_head_is_dead(stack: Stack, job: str) -> None:
    before = {name: beat.pid for name, beat in stack.training_workers(job).items()}
    restarts = stack.state.parts["head"].restarts

    kill_part(stack.home, "head")

    stack.await_updates(job)
    await_truth(lambda: stack.state.parts["head"].restarts > restarts)
    await_truth(lambda: stack.state.parts["controller"].ready)
    after = {name: beat.pid for name, beat in stack.training_workers(job).items()}
    assert after == before, "the same processes continued"


@pytest.mark.ci
def test_restarted_controller_finds_its_machines(stack: Stack, job: str) -> None:
    before = {one.id for one in stack.provider.machines()}
    restarts, view = stack.state.parts["controller"].restarts, stack.client.job(job)

    kill_part(stack.home, "controller")

    await_truth(lambda: stack.state.parts["controller"].restarts > restarts)
    await_truth(lambda: stack.state.parts["controller"].ready)
    stack.await_updates(job)
    after = stack.client.job(job)
    assert (after.kills, after.evictions) == (view.kills, view.evictions), "no machine was lost"
    assert {one.id for one in stack.provider.machines()} == before, "no duplicate, no orphan"


@pytest.mark.ci
def test_job_continues_after_down_and_up(stack: Stack, job: str) -> None:
    # Given a job that was never restored
    assert "restored" not in {event.kind for event in stack.client.job(job).events()}

    applied = stack.client.job(job).progress.samples_applied
    said: list[str] = []
    assert down(stack.settings, said.append)
    assert stack.provider.machines() == []
    assert said[0].startswith("workers push what they have")

    # Then it resumes at the same position after the next start
    up(stack.settings)
    assert stack.client.job(job).state == "running"
    stack.await_updates(job)
    assert stack.client.job(job).progress.samples_applied >= applied, "a last checkpoint"
    (event,) = [each for each in stack.client.job(job).events() if each.kind == "restored"]
    assert "with all updates" in event.text
    # And lists and counts have no machines and workers of before
    machines = set(stack.training_workers(job))
    assert {row.machine for row in stack.client.job(job).workers()} == machines
    assert {one.id for one in stack.provider.machines()} == machines
    assert {row.id for row in stack.client.machines()} == machines
