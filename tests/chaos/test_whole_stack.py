"""Faults that need a whole stack: Ray, machines, the controller, the API.

All tests share one stack, and those that kill parts of it share one job, which trains until the
last of them. Its model must then count every sample exactly once in each epoch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
from support.counted_job import HELD_SECONDS, CountedJob
from support.trackers import tensorboard_files
from support.waiting import await_truth

from vcasgd.chaos.faults import Freeze
from vcasgd.client import Client, Job
from vcasgd.fleet.providers.local.processes import Process, kill_all, processes_of
from vcasgd.fleet.providers.local.provider import LocalPool, LocalProvider
from vcasgd.schemas.fleet import WorkerRow
from vcasgd.schemas.jobs import JobView
from vcasgd.settings import Settings
from vcasgd.stack import StackHome, StackState, down, running, up
from vcasgd.stack.parts import mark

pytestmark = pytest.mark.slow

WORKERS = 3
#: Seconds for which parts are frozen.
FROZEN_SECONDS = 5
#: Epochs of the job that all faults hit: 15 minutes while it is held up, seconds afterwards.
EPOCHS = 14
#: Updates after which a fault has shown what it does.
SEVERAL = 6
#: Secrets of the platform that no machine has.
SECRETS = ("ledger", "tensors", "jobs", "job-secrets")
Eventually = Callable[..., Any]


class Stack:
    """A running stack, with the methods that tests need to disturb it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.jobs: dict[str, CountedJob] = {}
        self.home = StackHome(settings.home_path)
        self.provider = LocalProvider(self.home.path, settings.cluster, LocalPool("local", WORKERS))

    @property
    def state(self) -> StackState:
        return StackState.read(self.home.path)

    @cached_property
    def client(self) -> Client:
        token = self.home.token()
        assert token is not None
        return Client(self.state.api_url, token)

    def close(self) -> None:
        self.client.close()

    def kill(self, part: str) -> None:
        """Kill a part and all of its helpers with SIGKILL. Fails if it was not alive."""
        process = self.state.parts[part].process
        assert process is not None
        assert process.alive(), f"the fault did not fire: {part} was dead already"
        assert kill_all(mark(self.home, part), process)
        assert not process.alive()

    def processes(self, part: str) -> set[Process]:
        """Return all processes of a part."""
        return processes_of(mark(self.home, part), self.state.parts[part].process)

    def submit(self, *, epochs: int = 4, **fields: Any) -> str:
        """Submit a job that is held up until :meth:`finish`."""
        # More than the pool has, so that a full pool does not delay a replacement.
        workers = {"min": 1, "max": WORKERS + 1}
        job = CountedJob(
            self.client,
            self.home.path.parent,
            epochs,
            step_seconds=HELD_SECONDS,
            workers=workers,
            **fields,
        )
        self.jobs[job.id] = job
        return job.id

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
        """Wait until several more updates are applied."""
        before = self.updates(job)
        await_truth(lambda: self.updates(job) > before + SEVERAL)

    def heartbeats(self, job: str) -> dict[str, WorkerRow]:
        """Return the heartbeats of workers that train now, by machine."""
        rows = self.client.job(job).workers()
        fresh = time.time() - 4 * self.settings.heartbeat
        return {row.machine or "": row for row in rows if (row.at or 0.0) > fresh and row.steps}

    def updates(self, job: str) -> int:
        return self.client.job(job).totals.updates

    def finish(self, job: str) -> JobView:
        """Let the job end. Its model must count every sample exactly once in each epoch."""
        view = self.jobs[job].finish()
        assert view.progress.samples_repeated == 0
        return view


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("stack") / "home"
    settings = Settings(
        home=home, api_port=0, local_capacity=WORKERS, idle_seconds=300.0, log_format="json"
    )
    with running(settings):
        stack = Stack(settings)
        yield stack
        stack.close()


@pytest.fixture(scope="module")
def shared_job(stack: Stack) -> Iterator[str]:
    """A job that trains on three machines until a test, or this fixture, finishes it."""
    name = stack.submit(epochs=EPOCHS, checkpoint={"every": "1h"})
    yield name
    stack.finish(name)


@pytest.fixture
def job(stack: Stack, shared_job: str) -> str:
    """The shared job, with all of its workers in the middle of training."""
    stack.training_workers(shared_job)
    stack.await_updates(shared_job)
    return shared_job


@pytest.mark.extended
def test_request_id_appears_in_the_log_of_every_part(stack: Stack, tmp_path: Path) -> None:
    job = stack.client.job(stack.submit(epochs=1))

    stack.finish(job.id)

    request = job.request
    assert request
    assert {event.request for event in job.events()} == {request}
    # Workers log last, when they leave.
    everybody = {"api", "controller", "server", "worker"}
    await_truth(lambda: {line["role"] for line in _log_lines_of(stack, request)} >= everybody)
    lines = _log_lines_of(stack, request)
    of_workers = [line for line in lines if line["role"] == "worker"]
    assert {line["job"] for line in of_workers} == {job.id}
    machines = {each.machine for each in job.timelines()}
    assert all(any(name in line["worker"] for name in machines) for line in of_workers)
    # And other programs can read its metrics
    _assert_tables(job.refreshed(), tmp_path / "runs")


def _log_lines_of(stack: Stack, request: str) -> list[dict[str, Any]]:
    return [line for line in _log_lines(stack) if line.get("request") == request]


def _log_lines(stack: Stack) -> Iterator[dict[str, Any]]:
    """Yield the log lines of ``vcasgd`` processes, without those of Ray and the servers."""
    parts = (stack.home.path / "logs").glob("*.log")
    workers = Path(stack.state.scratch).glob("*/session_2*/logs/worker-*.err")
    for path in (*parts, *workers):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("{"):
                yield json.loads(line)


def _assert_tables(job: Job, folder: Path) -> None:
    # Imported here, because each process of the tests would wait for it.
    import pandas

    table = pandas.DataFrame(job.metrics())
    assert list(table["version"]) == sorted(table["version"])
    assert table["loss"].dtype == "float64"
    (applied,) = [each.metrics["applied"] for each in job.evaluations]

    files = tensorboard_files(job.track("tensorboard", folder=folder))
    (evaluated,) = files.Tensors("validation/applied")
    assert evaluated.step == job.evaluations[0].version
    assert evaluated.tensor_proto.float_val[0] == pytest.approx(applied)
    losses = [each.tensor_proto.float_val[0] for each in files.Tensors("train/loss")]
    assert losses == pytest.approx(list(table["loss"]))


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


def test_three_of_three_workers_die_at_once(stack: Stack, job: str, eventually: Eventually) -> None:
    victims, kills = set(stack.training_workers(job)), stack.client.job(job).kills

    for victim in victims:
        stack.provider.kill(victim)

    assert not any(stack.provider.processes(victim) for victim in victims), "the faults fired"
    stack.training_workers(job, but=victims)
    eventually(lambda: stack.client.job(job).kills >= kills + WORKERS)


@pytest.mark.ci
def test_evicted_worker_trains_on_and_is_replaced_at_the_notice(
    stack: Stack, job: str, eventually: Eventually
) -> None:
    victim, evictions = min(stack.training_workers(job)), stack.client.job(job).evictions

    # When a machine gets a notice with ample time
    stack.client.evict(machine=victim, notice_seconds=600)

    # Then a replacement trains, and its worker trains on
    stack.training_workers(job, but={victim})
    trained = _beat(stack, job, victim).samples or 0
    eventually(lambda: (_beat(stack, job, victim).samples or 0) > trained)
    assert victim in {one.id for one in stack.provider.machines()}, "replaced before its death"
    stack.provider.kill(victim)
    eventually(lambda: stack.client.job(job).evictions == evictions + 1)
    # And the timeline and the parameter server's counters show it
    lanes = {lane.machine: lane for lane in stack.client.job(job).timelines()}
    states = [span.state for span in lanes[victim].spans]
    assert states == ["booting", "running", "notice", "dead"]
    began = {span.state: span.since for span in lanes[victim].spans}
    _, worked, *_ = lanes[lanes[victim].replaced_by or ""].spans
    assert worked.state == "running"
    assert began["notice"] < worked.since < began["dead"]
    assert stack.client.store().nodes[0].memory_used_bytes > 0
    assert stack.client.job(job).metrics(points=50)[-1].workers >= 1


def _beat(stack: Stack, job: str, machine: str) -> WorkerRow:
    return next(row for row in stack.client.job(job).workers() if row.machine == machine)


def test_workers_continue_while_the_ray_head_is_dead(
    stack: Stack, job: str, eventually: Eventually
) -> None:
    before = {name: beat.pid for name, beat in stack.training_workers(job).items()}
    restarts = stack.state.parts["head"].restarts

    stack.kill("head")

    stack.await_updates(job)
    eventually(lambda: stack.state.parts["head"].restarts > restarts)
    eventually(lambda: stack.state.parts["controller"].ready)
    after = {name: beat.pid for name, beat in stack.training_workers(job).items()}
    assert after == before, "the same processes continued"


@pytest.mark.extended
def test_frozen_controller_and_head_stop_no_training(stack: Stack, job: str) -> None:
    before = {name: beat.pid for name, beat in stack.training_workers(job).items()}
    freezes = [Freeze(part, partial(stack.processes, part)) for part in ("controller", "head")]

    for freeze in freezes:
        freeze.begin()
    thaw_at = time.monotonic() + FROZEN_SECONDS
    while time.monotonic() < thaw_at:
        stack.await_updates(job)
    for freeze in freezes:
        freeze.end()

    stack.await_updates(job)
    after = {name: beat.pid for name, beat in stack.training_workers(job).items()}
    assert after == before, "the same processes continued"


@pytest.mark.ci
def test_restarted_controller_finds_its_machines(
    stack: Stack, job: str, eventually: Eventually
) -> None:
    before = {one.id for one in stack.provider.machines()}
    restarts, view = stack.state.parts["controller"].restarts, stack.client.job(job)

    stack.kill("controller")

    eventually(lambda: stack.state.parts["controller"].restarts > restarts)
    eventually(lambda: stack.state.parts["controller"].ready)
    stack.await_updates(job)
    after = stack.client.job(job)
    assert (after.kills, after.evictions) == (view.kills, view.evictions), "no machine was lost"
    assert {one.id for one in stack.provider.machines()} == before, "no duplicate, no orphan"


@pytest.mark.ci
def test_job_continues_after_down_and_up(stack: Stack, job: str, eventually: Eventually) -> None:
    # Given a job that was never restored
    assert "restored" not in {event.kind for event in stack.client.job(job).events()}

    # When everything is stopped
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


@pytest.mark.extended
def test_client_follows_events_through_the_death_of_the_api(stack: Stack, job: str) -> None:
    kinds, ids = [], []
    events = stack.client.job(job).events(follow=True)
    for event in events:
        if event.kind == "job-running" and event.kind not in kinds:
            stack.kill("api")
            stack.jobs[job].release()
        kinds.append(event.kind)
        ids.append(event.id)
        if event.kind == "job-succeeded":
            break

    assert ids == sorted(set(ids)), "no event is repeated or out of order"
    everything = [event.id for event in stack.client.job(job).events()]
    assert ids == everything[: len(ids)], "nothing missing"
    # And after all faults, the model counts every sample of every epoch once
    view = stack.finish(job)
    assert view.progress.samples_applied == view.progress.samples_expected
    buckets = stack.client.job(job).staleness().buckets
    assert sum(bucket.updates for bucket in buckets) == view.totals.updates
