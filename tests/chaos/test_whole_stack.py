"""The rows of the design's table of deaths that need the whole stack: Ray, machines, the API."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from safetensors.torch import load_file
from support.waiting import await_truth
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vcasgd.chaos.audit import AuditOptions, audit_spec
from vcasgd.client import Client, Job
from vcasgd.client.views import JobView
from vcasgd.fleet.providers.local.processes import kill_all, processes_of
from vcasgd.fleet.providers.local.provider import LocalPool, LocalProvider
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState, down, running, up
from vcasgd.stack.parts import mark

pytestmark = pytest.mark.slow

WORKERS = 3
#: of a local step while a job is held up: minutes for all of it
HELD_SECONDS = 0.5
Eventually = Callable[..., Any]


class Stack:
    """A running stack with what the tests do to it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        #: while this file is there, jobs come to no end
        self.hold = settings.home_path.with_name("hold")
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
        """SIGKILL to a part and all of its helpers; fails if it was not alive."""
        process = self.state.parts[part].process
        assert process is not None
        assert process.alive(), f"the fault did not fire: {part} was dead already"
        assert kill_all(mark(self.home, part), process)
        assert not process.alive()

    def submit(self, *, epochs: int = 4, **fields: Any) -> str:
        """A job that is held up until :meth:`finish`."""
        self.hold.touch()
        spec = audit_spec(AuditOptions(kills=7, epochs=epochs), self.hold).model_dump(mode="json")
        spec["args"]["step_seconds"] = HELD_SECONDS
        # more than there are: a pool that is full must not delay a replacement
        spec["workers"] = {"min": 1, "max": WORKERS + 1}
        return self.client.submit_directory(JobSpec.parse({**spec, **fields})).id

    def at_work(self, job: str, but: Collection[str] = ()) -> dict[str, dict[str, Any]]:
        """Waits until as many as there can be are at work; ``but``: others than these."""

        def found() -> dict[str, dict[str, Any]] | None:
            beats = {name: beat for name, beat in self.beats(job).items() if name not in but}
            return beats if len(beats) == WORKERS else None

        return await_truth(found) or {}

    def beats(self, job: str) -> dict[str, dict[str, Any]]:
        """Workers that are at work now, by instance."""
        rows = self.client.workers(job)
        fresh = time.time() - 4 * self.settings.heartbeat
        return {row["instance"]: row for row in rows if row["at"] > fresh and row["steps"]}

    def updates(self, job: str) -> int:
        return self.client.job(job).totals.updates

    def finish(self, job: str, folder: Path) -> JobView:
        """The job's end; its model must count every sample exactly once in each epoch."""
        self.hold.unlink(missing_ok=True)
        view = self.client.wait(job, 300)
        assert view.state == "succeeded", view.reason
        counts = load_file(self.client.download(job, folder / "model.safetensors"))["count"]
        assert torch.equal(counts, torch.full_like(counts, view.progress.epochs))
        assert view.progress.samples_repeated == 0
        return view


def settings_for(home: Path) -> Settings:
    return Settings(
        home=home, api_port=0, local_capacity=WORKERS, idle_seconds=300.0, log_format="json"
    )


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = settings_for(tmp_path_factory.mktemp("stack") / "home")
    with running(settings):
        stack = Stack(settings)
        yield stack
        stack.close()


@pytest.fixture
def job(stack: Stack, eventually: Eventually) -> Iterator[str]:
    """A job on three machines, in the middle of its training until it is finished."""
    name = stack.submit()
    stack.at_work(name)
    eventually(lambda: stack.updates(name) > 5)
    yield name
    if not stack.client.job(name).over:
        stack.client.cancel(name)


def test_no_machine_holds_what_opens_the_servers_for_everybody(stack: Stack, job: str) -> None:
    private = {stack.home.ensure_password(name) for name in ("ledger", "tensors", "jobs")}
    for machine in stack.at_work(job):
        files = [Path(f"/proc/{each.pid}/environ") for each in processes_of(machine, None)]
        files += (stack.home.path / "instances" / machine).rglob("*")
        read = {path: _text(path) for path in files if path.is_file()}
        assert sum(map(bool, read.values())) > 2
        assert not [path for path, text in read.items() for each in private if each in text]


def _text(path: Path) -> str:
    """Nothing, where its process is over, or the file is gone."""
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def test_one_id_leads_from_a_request_to_every_part(stack: Stack, tmp_path: Path) -> None:
    job = stack.client.job(stack.submit(epochs=1))

    stack.finish(job.id, tmp_path)

    request = job.request
    assert request
    assert {event.request for event in job.events()} == {request}
    # the last to say something are workers, as they leave
    everybody = {"api", "controller", "server", "worker"}
    await_truth(lambda: {line["role"] for line in _log_lines_of(stack, request)} >= everybody)
    lines = _log_lines_of(stack, request)
    of_workers = [line for line in lines if line["role"] == "worker"]
    assert {line["job"] for line in of_workers} == {job.id}
    machines = {each["instance"] for each in job.machines()}
    assert all(any(name in line["worker"] for name in machines) for line in of_workers)
    # And programs of others can read what it did
    _assert_tables(job.refreshed(), tmp_path / "runs")


def _log_lines_of(stack: Stack, request: str) -> list[dict[str, Any]]:
    return [line for line in _log_lines(stack) if line.get("request") == request]


def _log_lines(stack: Stack) -> Iterator[dict[str, Any]]:
    """All that our processes logged; Ray's and the servers' own lines are passed over."""
    parts = (stack.home.path / "logs").glob("*.log")
    workers = Path(stack.state.scratch).glob("*/session_2*/logs/worker-*.err")
    for path in (*parts, *workers):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("{"):
                yield json.loads(line)


def _assert_tables(job: Job, folder: Path) -> None:
    table = pandas.DataFrame(job.metrics())
    assert list(table["version"]) == sorted(table["version"])
    assert table["loss"].dtype == "float64"
    (applied,) = [each.metrics["applied"] for each in job.evaluations]

    files = EventAccumulator(str(job.tensorboard(folder)))
    files.Reload()
    (evaluated,) = files.Tensors("validation/applied")
    assert evaluated.step == job.evaluations[0].version
    assert evaluated.tensor_proto.float_val[0] == pytest.approx(applied)
    losses = [each.tensor_proto.float_val[0] for each in files.Tensors("train/loss")]
    assert losses == pytest.approx(list(table["loss"]))


def test_three_of_three_workers_die_at_once(stack: Stack, job: str, tmp_path: Path) -> None:
    victims = set(stack.at_work(job))

    for victim in victims:
        stack.provider.kill(victim)

    assert not any(processes_of(victim, None) for victim in victims), "the faults fired"
    stack.at_work(job, but=victims)
    view = stack.finish(job, tmp_path)
    assert view.kills >= WORKERS


def test_an_evicted_worker_hands_over_and_is_replaced_at_the_notice(
    stack: Stack, job: str, eventually: Eventually, tmp_path: Path
) -> None:
    victim = min(stack.at_work(job))

    # When a machine gets a notice of more time than anything takes
    stack.client.evict(instance=victim, notice_seconds=600)

    # Then its worker leaves in good order, and the next one is at work before it is dead
    eventually(lambda: "notice" in (_beat(stack, job, victim).get("leaving") or ""))
    assert _beat(stack, job, victim)["samples"] > 0
    stack.at_work(job, but={victim})
    assert victim in {one.id for one in stack.provider.instances()}, "replaced before its death"
    stack.provider.kill(victim)
    eventually(lambda: stack.client.job(job).evictions == 1)
    view = stack.finish(job, tmp_path)
    assert view.evictions == 1
    # and all of it is seen on the timeline, and in what the parameter server counted
    lanes = {lane["instance"]: lane for lane in stack.client.machines(job)}
    states = [span["state"] for span in lanes[victim]["spans"]]
    assert states == ["booting", "running", "notice", "dead"]
    began = {span["state"]: span["from"] for span in lanes[victim]["spans"]}
    _, worked, *_ = lanes[lanes[victim]["replaced_by"]]["spans"]
    assert worked["state"] == "running"
    assert began["notice"] < worked["from"] < began["dead"]
    found = stack.client.staleness(job)
    assert sum(bucket["updates"] for bucket in found["buckets"]) == view.totals.updates
    assert stack.client.store()["nodes"][0]["memory_used_bytes"] > 0
    assert stack.client.metrics(job, points=50)[-1]["workers"] >= 1


def _beat(stack: Stack, job: str, instance: str) -> dict[str, Any]:
    return next(row for row in stack.client.workers(job) if row["instance"] == instance)


def test_workers_train_on_while_the_head_of_ray_is_dead(
    stack: Stack, job: str, eventually: Eventually, tmp_path: Path
) -> None:
    before = {name: beat["pid"] for name, beat in stack.at_work(job).items()}
    updates, restarts = stack.updates(job), stack.state.parts["head"].restarts

    stack.kill("head")

    eventually(lambda: stack.updates(job) > updates + 5)
    eventually(lambda: stack.state.parts["head"].restarts > restarts)
    eventually(lambda: stack.state.parts["controller"].ready)
    after = {name: beat["pid"] for name, beat in stack.at_work(job).items()}
    assert after == before, "the same processes went on"
    stack.finish(job, tmp_path)


def test_a_restarted_controller_finds_its_machines(
    stack: Stack, job: str, eventually: Eventually, tmp_path: Path
) -> None:
    before = {one.id for one in stack.provider.instances()}
    restarts = stack.state.parts["controller"].restarts

    stack.kill("controller")

    eventually(lambda: stack.state.parts["controller"].restarts > restarts)
    eventually(lambda: stack.state.parts["controller"].ready)
    view = stack.finish(job, tmp_path)
    assert view.kills == view.evictions == 0, "no machine was lost"
    assert {one.id for one in stack.provider.instances()} == before, "no duplicate, no orphan"


def test_a_client_follows_through_the_death_of_the_api(
    stack: Stack, job: str, eventually: Eventually, tmp_path: Path
) -> None:
    kinds, ids = [], []
    events = stack.client.events(job, follow=True)
    for event in events:
        kinds.append(event.kind)
        ids.append(event.id)
        if event.kind == "job-running":
            stack.kill("api")
            stack.hold.unlink()
        if event.kind == "job-succeeded":
            break

    assert ids == sorted(set(ids)), "nothing twice, nothing out of order"
    everything = [event.id for event in stack.client.events(job)]
    assert ids == everything[: len(ids)], "nothing missing"
    stack.finish(job, tmp_path)


def test_a_paused_job_gives_its_workers_up_and_goes_on_when_resumed(
    stack: Stack, job: str, eventually: Eventually, tmp_path: Path
) -> None:
    stack.client.pause(job)

    eventually(lambda: not stack.beats(job))
    at_rest = stack.updates(job)
    stack.client.resume(job)

    eventually(lambda: stack.updates(job) > at_rest)
    stack.finish(job, tmp_path)


def test_no_capacity_is_shown_and_the_job_starts_when_there_is_some(
    stack: Stack, eventually: Eventually, tmp_path: Path
) -> None:
    # Given no machine, and no capacity for one
    for one in stack.provider.instances():
        stack.provider.terminate(one.id)
    stack.provider.override(capacity=0)
    name = stack.submit(epochs=1)

    # Then the reason is there to see
    eventually(lambda: any("0 of 0" in (pool["reason"] or "") for pool in stack.client.pools()))
    assert stack.client.job(name).state == "starting"

    # When there is capacity again, the job runs
    stack.provider.override(capacity=WORKERS)
    stack.finish(name, tmp_path)


def test_a_job_goes_on_after_down_and_up(tmp_path: Path, eventually: Eventually) -> None:
    stack = Stack(settings_for(tmp_path / "home"))
    try:
        # Given a job in the middle of its training
        up(stack.settings)
        job = stack.submit(checkpoint={"every": "1h"})
        eventually(lambda: stack.updates(job) > 5)

        # When everything is stopped
        applied = stack.client.job(job).progress.samples_applied
        assert down(stack.settings)
        assert stack.provider.instances() == []

        # Then it goes on where it was after the next start
        up(stack.settings)
        resumed_at = stack.client.job(job)
        assert resumed_at.state == "running"
        eventually(lambda: stack.updates(job) > 5)
        assert stack.client.job(job).progress.samples_applied >= applied, "a last checkpoint"
        view = stack.finish(job, tmp_path)
        kinds = {event.kind for event in stack.client.events(job)}
        assert "restored" in kinds
        assert view.progress.samples_applied == view.progress.samples_expected
    finally:
        down(stack.settings)
        stack.close()
