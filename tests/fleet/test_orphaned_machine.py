"""Ends of a cloud's machine: its shutdown, and the dead-man's switch.

A machine whose controller stays down ends itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.metadata import Metadata, MetadataServer
from support.waiting import PATIENCE, await_truth

from vcasgd.fleet.providers.base import PYTHON, Boot
from vcasgd.fleet.providers.user_data import boot_environment
from vcasgd.steady_time import boot_time
from vcasgd.storage.objects import LIFE_SIGN, SIGNS, LifeSign, Silence, Storage

#: Seconds of silence after which the machine ends.
ORPHAN = 3.0

#: A node that prints the notice that its machine gives to the worker, however late it sees it.
_NODE = (
    "import os, pathlib, signal, time\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
    "print('up', flush=True)\n"
    "notice = pathlib.Path(os.environ['VCASGD_NOTICE_FILE'])\n"
    "while not notice.exists(): time.sleep(0.05)\n"
    "print(notice.read_text(), flush=True)\n"
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})\n"
    "time.sleep(300)\n"
)
#: The process of the machine, with the test's clock, and a short time for the worker to leave.
_MACHINE = (
    "import pathlib, sys\nfrom vcasgd.machine import main as machine\n"
    "clock = pathlib.Path(sys.argv[1])\nmachine.boot_time = lambda: float(clock.read_text())\n"
    "machine.GRACE_SECONDS = 1.0\n"
    f"machine.STOP_SECONDS = {PATIENCE}\nsys.exit(machine.main())"
)


class Clock:
    """The clock of a machine, which stands still while the test is suspended."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._now = 0.0
        self.advance()

    def advance(self) -> None:
        """Let the time between two signs of a controller pass."""
        self._now += ORPHAN / SIGNS
        new = self.file.with_suffix(".new")
        new.write_text(str(self._now))
        new.replace(self.file)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(f"file://{tmp_path}/storage")


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "clock")


@pytest.fixture
def machine(storage: Storage, clock: Clock) -> Iterator[subprocess.Popen[str]]:
    """Start what a cloud's machine runs, without Ray."""
    boot = Boot(
        (PYTHON, "-c", _NODE),
        {"VCASGD_STORAGE_URL": storage.url, "VCASGD_ORPHAN_SECONDS": str(ORPHAN)},
    )
    with MetadataServer(Metadata("i-123")) as metadata:
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("VCASGD_")},
            **boot_environment(boot, "aws", "us-east-1", {}),
            "VCASGD_METADATA_URL": metadata.url,
        }
        argv = [sys.executable, "-c", _MACHINE, str(clock.file)]
        with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as process:
            yield process
            process.kill()


def test_a_machine_lives_with_its_controller_and_ends_without(
    storage: Storage, machine: subprocess.Popen[str], clock: Clock
) -> None:
    # Given a machine that has run for longer than it may without a controller
    assert machine.stdout is not None
    controller = LifeSign(storage, ORPHAN / SIGNS)
    controller.start()
    assert machine.stdout.readline() == "up\n"
    signs: set[bytes] = set()

    def several() -> bool:
        controller.beat()
        if storage.has(LIFE_SIGN) and (sign := storage.get(LIFE_SIGN)) not in signs:
            signs.add(sign)
            clock.advance()
        return len(signs) >= 3 * SIGNS

    await_truth(several)
    assert machine.poll() is None

    # When the controller is gone, then the worker gets notice, and the machine ends
    controller.stop()
    await_end(machine, clock)
    assert json.loads(machine.stdout.readline())["kind"] == "terminate"


def test_a_shutdown_becomes_a_notice_and_then_the_end(machine: subprocess.Popen[str]) -> None:
    assert machine.stdout is not None
    assert machine.stdout.readline() == "up\n"
    began, noticed_at = time.time(), boot_time()
    machine.send_signal(signal.SIGTERM)
    notice = json.loads(machine.stdout.readline())
    assert notice["kind"] == "terminate"
    # The machine ends it a second after the notice, which it may see later.
    assert noticed_at <= notice["at"] - 1.0 <= boot_time()
    assert machine.wait(timeout=PATIENCE) != 0
    assert time.time() - began >= 1.0


def test_a_machine_that_never_sees_a_controller_ends(
    machine: subprocess.Popen[str], clock: Clock
) -> None:
    await_end(machine, clock)


def await_end(machine: subprocess.Popen[str], clock: Clock) -> None:
    await_truth(lambda: (clock.advance(), machine.poll() is not None)[1])
    assert machine.returncode != 0


@pytest.mark.parametrize(
    ("signs", "seconds"),
    [
        ([None, None, None], 20.0),
        ([b"1", b"1", b"1"], 20.0),
        ([b"1", b"2", b"2"], 10.0),
        ([b"1", b"2", b"3"], 0.0),
        ([b"1", None, b"1"], 20.0),
        ([b"1", None, b"2"], 0.0),
        ([None, b"1", None], 10.0),
    ],
)
def test_only_a_new_sign_ends_the_silence(signs: list[bytes | None], seconds: float) -> None:
    silence = Silence(0.0)
    found = [silence.seconds(sign, 10.0 * look) for look, sign in enumerate(signs)]
    assert found[-1] == seconds
