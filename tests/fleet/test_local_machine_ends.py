"""Ends of local machines: notices, kills, failures, and the loss of their owner."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from support.clocks import SteppingClock
from support.local_machines import TEMPLATE, LocalCluster
from support.waiting import PATIENCE, await_truth

from vcasgd.errors import FleetError
from vcasgd.fleet.notices import FileNotices, Notice
from vcasgd.fleet.providers.base import Boot
from vcasgd.fleet.providers.local.machine import Owner, is_locked
from vcasgd.fleet.providers.local.processes import Process, processes_of
from vcasgd.fleet.providers.local.provider import KEPT_DEAD
from vcasgd.schemas.fleet import MachineState

#: Acquires the lock as the owner of the machines does, reports it, and waits to be killed.
HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "wb")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that owns ``stack.lock``."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "stack.lock")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_eviction_gives_notice(cluster: LocalCluster) -> None:
    id_, processes = cluster.launch_ready()
    notices = FileNotices(cluster.directory(id_).notice_file)
    assert notices.poll() is None

    began = time.time()
    cluster.another().evict(id_)
    ended = time.time()
    notice = await_truth(notices.poll)
    assert isinstance(notice, Notice)
    assert notice.kind == "terminate"
    assert notice.at is not None
    assert began <= notice.at - TEMPLATE.notice_seconds <= ended, "the default of the pool"
    assert cluster.state(id_) is MachineState.LEAVING
    assert all(process.alive() for process in processes)

    first = cluster.machine(id_)
    cluster.provider.evict(id_, 0)
    assert cluster.machine(id_) == first, "the first notice is kept"


def test_a_step_of_the_clock_changes_no_notice(
    cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a machine whose clock is set forward by an hour
    clock = SteppingClock(tmp_path_factory.mktemp("clock"))
    for name, value in clock.env.items():
        monkeypatch.setenv(name, value)
    id_, processes = cluster.launch_ready()
    clock.set(3600)
    # When it gets notice
    cluster.provider.evict(id_, 300)
    # Then its worker has that time
    notice = await_truth(FileNotices(cluster.directory(id_).notice_file).poll)
    assert isinstance(notice, Notice)
    assert notice.at is not None
    assert 200 < notice.at - time.time() <= 300
    assert all(process.alive() for process in processes)


def test_machines_on_a_full_disk_are_listed_and_end(cluster: LocalCluster) -> None:
    id_, processes = cluster.launch_ready()
    # Given a disk without room for a byte
    with _no_room():
        with pytest.raises(FleetError, match="can't be written"):
            cluster.provider.evict(id_)
        # When a machine is ended
        cluster.provider.terminate(id_)
        cluster.await_death(processes)
        # Then it is no longer among those that are listed
        assert cluster.state(id_) is None
    # And with room again, that is recorded
    assert cluster.state(id_) is None
    assert cluster.directory(id_).reaped()


@contextlib.contextmanager
def _no_room() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_machine_is_gone_at_the_end_of_its_notice(cluster: LocalCluster) -> None:
    id_, processes = cluster.launch_ready()

    began = time.time()
    cluster.another().evict(id_, 1.0)

    cluster.await_death(processes)
    assert began + 1.0 <= time.time()
    assert cluster.state(id_) is None


def test_hung_machine_is_ended_after_its_notice(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vcasgd.fleet.providers.local.directory.NOTICE_SLACK_SECONDS", 0.2)
    id_, processes = cluster.launch_ready()
    os.kill(cluster.root(id_).pid, signal.SIGSTOP)
    cluster.provider.evict(id_, 0.1)
    cluster.await_state(id_, None)
    cluster.await_death(processes)


def test_machine_whose_own_process_was_killed_is_cleaned_up(cluster: LocalCluster) -> None:
    id_, processes = cluster.launch_ready()
    processes[0].kill()
    cluster.await_state(id_, None)
    # The process without a marker also left the session, and the tree ended with the machine.
    cluster.await_death(processes[:3])
    processes[3].kill()


def test_machine_ends_all_its_processes_on_sigterm(cluster: LocalCluster) -> None:
    _, processes = cluster.launch_ready()
    os.kill(processes[0].pid, signal.SIGTERM)
    cluster.await_death(processes)


def test_machine_ends_with_its_boot_command(cluster: LocalCluster) -> None:
    (id_,) = cluster.launch(boot=Boot(("sh", "-c", "setsid sleep 300 & exit 3")))
    cluster.await_state(id_, None)
    assert processes_of(id_, None) == set()
    condemned = (cluster.directory(id_).path / "condemned.json").read_text()
    assert "boot command ended with status 3" in condemned


def test_a_machine_says_why_it_failed_before_it_is_gone(cluster: LocalCluster) -> None:
    # A provider that sees that it is gone may kill it at once.
    (id_,) = cluster.launch(boot=Boot(("/does/not/exist",)))
    directory = cluster.directory(id_)
    await_truth(directory.marked_terminated)
    await_truth(lambda: "/does/not/exist" in directory.log.read_text())

    (line,) = [each for each in directory.log.read_text().splitlines() if "ERROR" in each]
    said = datetime.strptime(" ".join(line.split()[:2]), "%Y-%m-%d %H:%M:%S,%f").astimezone()
    gone_at = json.loads((directory.path / "condemned.json").read_text())["at"]
    assert said.timestamp() <= gone_at


def test_eviction_before_the_boot(cluster: LocalCluster) -> None:
    cluster.provider.override(boot_seconds=60)
    (id_,) = cluster.launch()
    assert cluster.state(id_) is MachineState.BOOTING
    cluster.provider.evict(id_, 0)
    cluster.await_state(id_, None)
    assert not (cluster.directory(id_).path / "ready").exists()


def test_machines_end_with_the_stack_that_owns_them(
    cluster: LocalCluster, holder: subprocess.Popen[str]
) -> None:
    cluster.provider = cluster.another(owner_grace_seconds=3.0)
    id_, processes = cluster.launch_ready()
    began = time.monotonic()
    holder.send_signal(signal.SIGKILL)
    holder.wait(timeout=PATIENCE)
    assert not is_locked(cluster.home / "stack.lock")
    cluster.await_death(processes)
    assert time.monotonic() - began > 0.4
    assert cluster.state(id_) is None


def test_machines_survive_a_restart_of_the_stack(tmp_path: Path) -> None:
    lock, times = tmp_path / "stack.lock", iter([0.0, 15.0, 30.0, 49.0, 51.0, 70.0, 72.0])
    owner = Owner(lock, 20.0, lambda: next(times))
    with held(lock):
        assert not owner.gone()
        assert not owner.gone()
    assert not owner.gone()
    with held(lock):
        assert not owner.gone()
    assert not owner.gone()
    assert owner.gone()


def test_machine_without_an_owner_keeps_running(tmp_path: Path) -> None:
    times = iter([0.0, 1e9])
    assert not Owner(tmp_path / "stack.lock", None, lambda: next(times)).gone()


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_reused_process_number_is_not_the_machine(cluster: LocalCluster) -> None:
    me = Process.of(os.getpid())
    assert me.alive()
    assert not Process(me.pid, me.started - 1).alive()
    Process(me.pid, me.started - 1).kill()
    assert processes_of("local-unknown", Process(me.pid, me.started - 1)) == set()


def test_logs_of_the_last_dead_machines_are_kept(cluster: LocalCluster) -> None:
    (id_,) = cluster.launch()
    cluster.provider.kill(id_)
    original = cluster.directory(id_).path
    for index in range(KEPT_DEAD + 3):
        copy = original.with_name(f"local-{index:012x}")
        copy.mkdir()
        for name in ("launch.json", "buried.json"):
            (copy / name).write_bytes((original / name).read_bytes())
    (living,) = cluster.launch(1, "t2")
    cluster.provider.kill(living)
    assert len(list((cluster.home / "machines").glob("local-*"))) == KEPT_DEAD
    assert cluster.directory(living).log.exists()
