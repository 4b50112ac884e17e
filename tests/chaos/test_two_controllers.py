"""Two controllers that both act, because the ledger's clock steps while one of them launches."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from support.clocks import SteppingServer
from support.counted_job import HELD_SECONDS, CountedJob
from support.harness import Process

from vcasgd.client import Client
from vcasgd.fleet.providers.local.processes import MARKER
from vcasgd.fleet.providers.local.provider import LocalPool, LocalProvider
from vcasgd.settings import Settings
from vcasgd.stack import StackHome, StackState, running
from vcasgd.store.keys import CONTROLLER

pytestmark = [pytest.mark.slow, pytest.mark.extended]

Eventually = Callable[..., Any]
HOUR = 3600
#: Machines of the job, and of the pool, which would have room if each controller bought them.
WORKERS, CAPACITY = 2, 6


@pytest.fixture
def stepping(tmp_path: Path) -> Iterator[SteppingServer]:
    server = SteppingServer(tmp_path / "ledger", durable=True)
    yield server
    server.end()


@pytest.fixture
def settings(stepping: SteppingServer, tmp_path: Path) -> Iterator[Settings]:
    settings = Settings(
        home=tmp_path / "home",
        api_port=0,
        local_capacity=CAPACITY,
        idle_seconds=300.0,
        ledger_url=SecretStr(stepping.url),
    )
    with running(settings):
        yield settings


@pytest.fixture
def second(settings: Settings, tmp_path: Path) -> Iterator[Process]:
    """A second controller with the environment of the stack's."""
    first = StackState.read(settings.home_path).parts["controller"].pid
    words = Path(f"/proc/{first}/environ").read_text().rstrip("\0").split("\0")
    env = dict(word.split("=", 1) for word in words) | {MARKER: "second"}
    process = Process(
        [sys.executable, "-m", "vcasgd.controller.main"], tmp_path / "second.log", env
    )
    yield process
    process.end()
    sys.stdout.write((tmp_path / "second.log").read_text()[-4000:])


def test_no_machine_is_bought_twice_and_no_update_is_repeated(
    stepping: SteppingServer,
    settings: Settings,
    second: Process,
    tmp_path: Path,
    eventually: Eventually,
) -> None:
    state, home = StackState.read(settings.home_path), StackHome(settings.home_path)
    first = state.parts["controller"].pid
    provider = LocalProvider(home.path, settings.cluster, LocalPool("local", CAPACITY))
    with Client(state.api_url, home.token() or "") as client:
        # Given a job on two machines, and two controllers, one of which stands by
        workers = {"min": 1, "max": WORKERS}
        job = CountedJob(client, tmp_path, 3, step_seconds=HELD_SECONDS, workers=workers)
        eventually(lambda: sum(bool(row.steps) for row in client.job(job.id).workers()) == WORKERS)
        token = int(stepping.connection.hget(CONTROLLER, "token") or 0)
        before = launched(settings)
        assert len(before) == WORKERS

        # When the first one is suspended while it replaces a machine, and the ledger's clock steps
        with (home.path / "machines" / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            provider.kill(min(before))
            eventually(lambda: launches(first))
            os.kill(first, signal.SIGSTOP)
        assert launches(first), "the fault fired: it is in the middle of a launch"
        stepping.set_clock(HOUR)

        # Then the other one takes over and replaces the machine
        eventually(lambda: int(stepping.connection.hget(CONTROLLER, "token") or 0) == token + 1)
        eventually(lambda: launched(settings) - before)
        (bought,) = launched(settings) - before
        eventually(lambda: has_launched(tmp_path / "second.log", bought))

        # and the first one, which finishes its launch, gets the same machine
        os.kill(first, signal.SIGCONT)
        eventually(lambda: has_launched(home.logs / "controller.log", bought))
        eventually(lambda: len(job.machines()) == WORKERS)
        assert job.finish().progress.samples_repeated == 0
        assert launched(settings) - before == {bought}
        assert second.alive


def launched(settings: Settings) -> set[str]:
    """Return all machines that were ever bought."""
    return {path.name for path in (settings.home_path / "machines").glob("local-*")}


def has_launched(log: Path, machine: str) -> bool:
    return f"launched in local: {machine}" in log.read_text()


def launches(process: int) -> bool:
    """Return True if a process waits for the lock of launches."""
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # It was closed meanwhile.
            if str(link.readlink()).endswith("machines/.lock"):
                return True
    return False
