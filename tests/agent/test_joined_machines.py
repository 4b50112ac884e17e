"""Machines that join a stack: real agents, real workers, no Ray."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.children import Process
from support.counted_job import HELD_SECONDS, CountedJob
from support.joinable_stack import Volunteers, joinable_stack
from support.namespaces import OnePort, one_port
from support.sandboxes import working_sandbox
from support.training import TASKS
from support.waiting import await_truth

from vcasgd.chaos.audited_job import FINISH_SECONDS
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState
from vcasgd.stack.layout import GATEWAY
from vcasgd.store import keys
from vcasgd.store.connection import connect
from vcasgd.store.embedded import ServerFiles

#: Fails if it reaches any of the ports.
PROBE = """
import socket

for port in {}:
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, port
"""


@pytest.fixture(scope="module")
def volunteers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Volunteers]:
    with joinable_stack(tmp_path_factory.mktemp("volunteers")) as volunteers:
        yield volunteers


@pytest.mark.slow
@pytest.mark.ci
def test_machine_behind_one_port_trains_and_another_one_continues_after_its_death(
    volunteers: Volunteers, tmp_path: Path
) -> None:
    # Given a machine that reaches nothing but the port for joining
    with one_port(volunteers.port) as place:
        _run_audit(volunteers, place, tmp_path)
        assert place.connections > 0
        ports = sorted(set(volunteers.state.ports.values()))
        done = Process(place.command([sys.executable, "-c", PROBE.format(ports)]), tmp_path / "log")
        assert done.wait() == 0, "no other port is reachable"


def _run_audit(volunteers: Volunteers, place: OnePort, folder: Path) -> None:
    assert "head" not in volunteers.state.parts, "there is no Ray"
    token = volunteers.token("audit")
    # Few samples, because each update takes several times as long through the gateway.
    job = CountedJob(
        volunteers.client, folder, step_seconds=HELD_SECONDS, args={"samples": 400}, push_every=2
    )
    with volunteers.machine(token, "--share", str(folder), place=place) as first:
        await_truth(lambda: job.updates() > 3)
        workers = first.workers()
        assert workers

        # When it is killed, and another one joins
        first.process.kill()
        await_truth(lambda: not any(each.is_running() for each in workers))
    before = job.updates()
    with volunteers.machine(token, "--sandbox", "off", place=place) as second:
        await_truth(lambda: job.updates() > before + 3)

        # Then the other one ends the job, and every sample was applied exactly once
        job.finish()
        assert second.process.terminate() == 0
        assert second.said("left in good order")
        assert second.left_nothing()


@pytest.mark.slow
@pytest.mark.extended
def test_machines_train_while_the_stack_loses_its_parts(
    volunteers: Volunteers, tmp_path: Path
) -> None:
    token, home = volunteers.token("parts"), volunteers.settings.home
    job = CountedJob(volunteers.client, tmp_path, step_seconds=HELD_SECONDS)
    share = ("--share", str(tmp_path))
    with volunteers.machine(token, *share) as first, volunteers.machine(token, *share) as second:
        # Given machines that train, one of which is evicted
        await_truth(lambda: len(first.workers()) == len(second.workers()) == 1)
        await_truth(lambda: job.updates() > 3)
        volunteers.client.evict(machine=second.name())
        assert second.process.wait() == 0
        assert second.said("leaves: evicted at")
        assert second.said("left in good order")

        # When the gateway, the API, and the controller are killed
        for part in (GATEWAY, "api", "controller"):
            _kill(home, part)

            # Then the other machine goes on
            job.await_updates(3)

        # When the gateway, and then the API, is silent for longer than a machine may be
        for part in (GATEWAY, "api"):
            with _frozen(home, part):
                await_truth(lambda: _silence(volunteers) > 5 * volunteers.settings.lease_seconds)
            job.await_updates(3)
            assert not job.events("worker-killed"), "its silence is not the machine's"
        job.finish()
        assert first.process.alive
        assert not first.said("removed"), "it was never lost"


@contextmanager
def _frozen(home: Path, part: str) -> Iterator[None]:
    pid = StackState.read(home).parts[part].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _silence(volunteers: Volunteers) -> float:
    """Return the seconds since the last report of a machine."""
    home = StackHome(volunteers.settings.home)
    files = ServerFiles(home.path, volunteers.state.ports["ledger"], home.ensure_password("ledger"))
    with closing(connect(files.url)) as ledger:
        reports = ledger.hgetall(keys.JOINED_REPORTS).values()
        return ledger.now() - max(json.loads(row)["at"] for row in reports)


def _kill(home: Path, part: str) -> None:
    """Kill a part of the stack, and wait until it is ready again."""
    before = StackState.read(home).parts[part]
    os.kill(before.pid, signal.SIGKILL)
    await_truth(lambda: StackState.read(home).parts[part].restarts > before.restarts)
    await_truth(lambda: StackState.read(home).parts[part].ready)


@pytest.mark.slow
@pytest.mark.ci
def test_task_that_tries_to_break_out_finds_nothing_and_trains_to_its_end(
    volunteers: Volunteers, tmp_path: Path
) -> None:
    working_sandbox()
    # Given a file of the machine's owner, and a task that tries to read it, among others
    (tmp_path / "secret").write_text("of the owner")
    options = ("--sandbox", "require", "--max-disk", "200MB")
    with volunteers.machine(volunteers.token("pry"), *options) as machine:
        args = {
            "secret": str(tmp_path / "secret"),
            "port": volunteers.port,
            "agent": machine.process.pid,
        }

        # When it trains
        job = volunteers.client.submit_directory(prying_spec(args))

        # Then it found nothing, and trained
        ended = volunteers.client.job(job.id).wait(FINISH_SECONDS)
        assert ended.state == "succeeded", ended.reason
        assert machine.said("jobs see none of your files and processes, reach only the stack")
        assert machine.process.terminate() == 0
        assert machine.said("left in good order")
        assert machine.left_nothing()


@pytest.mark.slow
@pytest.mark.ci
def test_worker_that_takes_too_much_memory_is_killed(volunteers: Volunteers) -> None:
    working_sandbox()
    options = ("--sandbox", "require", "--max-memory", "1.5GB")
    with volunteers.machine(volunteers.token("hog"), *options) as machine:
        args = {"secret": "", "port": 0, "agent": 0, "megabytes": 2_000}
        job = volunteers.client.submit_directory(prying_spec(args))

        await_truth(lambda: machine.said("GB of memory; its machine allows 1.50 GB"))
        volunteers.client.job(job.id).cancel()


def prying_spec(args: dict[str, Any]) -> JobSpec:
    """Return a job whose task tries to break out of its sandbox."""
    return JobSpec.parse(
        {
            "name": "prying",
            "task": "prying:Prying",
            "working_dir": str(TASKS),
            "args": args,
            "epochs": 2,
            "subtasks_per_epoch": 2,
            "workers": {"min": 1, "max": 1},
        }
    )


LOGINCTL = """#!/bin/sh
case "$*" in
  *list-sessions*) echo "2 1000 ann seat0 tty2" ;;
  *show-session*) printf 'Type=wayland\\nActive=yes\\n'; cat "$(dirname "$0")/idle" ;;
esac
"""


@pytest.mark.ci
def test_machine_leaves_while_somebody_uses_it(volunteers: Volunteers, tmp_path: Path) -> None:
    # Given a machine whose desktop is idle
    program, idle = tmp_path / "loginctl", tmp_path / "idle"
    program.write_text(LOGINCTL)
    program.chmod(0o755)
    is_idle = "IdleHint=yes\nIdleSinceHint=1000000\n"
    idle.write_text(is_idle)
    token = volunteers.token("away")
    options = ("--when-idle", "1s", "--sandbox", "off")
    with volunteers.machine(token, *options, programs=tmp_path) as machine:
        await_truth(lambda: machine.said("joined as join-away-"))

        # When somebody uses it
        idle.write_text("IdleHint=no\nIdleSinceHint=0\n")

        # Then it leaves, and joins again when it is idle
        await_truth(lambda: machine.said("leaves: somebody uses this machine"))
        await_truth(lambda: machine.said("left in good order"))
        idle.write_text(is_idle)
        await_truth(lambda: machine.log.read_text().count("joined as join-away-") == 2)


@pytest.mark.ci
def test_revoked_token_ends_the_machine(volunteers: Volunteers) -> None:
    with volunteers.machine(volunteers.token("eve"), "--sandbox", "off") as agent:
        await_truth(lambda: agent.said("joined as join-eve-"))
        volunteers.client.revoke_token("eve")

        assert agent.process.wait() == 1
        assert agent.said("the token is wrong or was revoked")
        assert agent.left_nothing()
