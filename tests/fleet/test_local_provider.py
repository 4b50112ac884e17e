"""Local provider: each test starts and kills real processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE

from vcasgd.errors import FleetError, InvalidRequest, NoCapacity, SpecError
from vcasgd.fleet.machine.notices import FileNotices, Notice
from vcasgd.fleet.providers.base import PYTHON, Boot, Instance, InstanceState, Provider
from vcasgd.fleet.providers.local.directory import InstanceDirectory
from vcasgd.fleet.providers.local.instance import Owner, is_locked
from vcasgd.fleet.providers.local.processes import Process, processes_of
from vcasgd.fleet.providers.local.provider import KEPT_DEAD, LocalPool, LocalProvider

Eventually = Callable[..., Any]

#: A child, a grandchild in its own session, and an orphan that hides its environment.
FAMILY = """
echo $$ > pids
setsid sleep 300 &
echo $! >> pids
(setsid env -i sleep 300 & echo $! >> pids)
echo "$GREETING" > greeting
echo done > ready
wait
"""
BOOT = Boot(("sh", "-c", FAMILY), {"GREETING": "hello {instance_id}", "PATH": os.environ["PATH"]})
#: Reports what it finds imported, and starts a process in its own session.
FORKED = """
import os, pathlib, subprocess, sys, time
subprocess.Popen(["setsid", "sleep", "300"])
text = f"{'wave' in sys.modules} {sys.argv[1:]} {os.environ['GREETING']} {pathlib.Path.cwd().name}"
pathlib.Path("ready.new").write_text(text)
pathlib.Path("ready.new").rename("ready")
time.sleep(300)
"""
POOL = LocalPool("local", capacity=2, price_per_hour=0.5, notice_seconds=30.0)

#: Acquires the lock as the owner of the machines does, reports it, and waits to be killed.
HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "wb")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


class Cluster:
    """Provider with helpers to inspect its machines."""

    def __init__(self, home: Path, eventually: Eventually) -> None:
        self.home = home
        self.eventually = eventually
        self.provider = self.another()

    def another(self, owner_grace_seconds: float | None = None) -> LocalProvider:
        """Return a provider as in another process, which shares only the home."""
        return LocalProvider(self.home, "test", POOL, owner_grace_seconds=owner_grace_seconds)

    def launch(self, count: int = 1, token: str = "t1", boot: Boot = BOOT) -> list[str]:
        return self.provider.launch("local", count, boot, token)

    def launch_ready(self) -> tuple[str, list[Process]]:
        """Return one running machine and all of its processes."""
        (id_,) = self.launch()
        self.eventually((self.directory(id_).path / "ready").exists)
        return id_, self.processes(id_)

    def directory(self, id_: str) -> InstanceDirectory:
        return InstanceDirectory(self.home / "instances" / id_)

    def machine(self, id_: str) -> Process:
        machine = self.directory(id_).machine()
        assert machine is not None
        return machine.process

    def processes(self, id_: str) -> list[Process]:
        pids = (self.directory(id_).path / "pids").read_text().split()
        assert len(pids) == 3
        return [self.machine(id_), *(Process.of(int(pid)) for pid in pids)]

    def instance(self, id_: str) -> Instance | None:
        return next((one for one in self.another().instances() if one.id == id_), None)

    def state(self, id_: str) -> InstanceState | None:
        instance = self.instance(id_)
        return instance.state if instance else None

    def await_state(self, id_: str, state: InstanceState | None) -> None:
        self.eventually(lambda: self.state(id_) is state)

    def await_death(self, processes: list[Process]) -> None:
        self.eventually(lambda: not any(process.alive() for process in processes))


@pytest.fixture
def cluster(tmp_path: Path, eventually: Eventually) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, eventually)
    yield cluster
    cluster.provider.destroy_all()


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


def test_it_is_a_provider(cluster: Cluster) -> None:
    provider: Provider = cluster.provider
    assert provider.name == "local"
    assert provider.instances() == []
    provider.close()


def test_machine_boots_and_runs_its_command(cluster: Cluster) -> None:
    began = time.time()
    id_, processes = cluster.launch_ready()
    instance = cluster.instance(id_)
    assert instance is not None
    assert (instance.pool, instance.state, instance.notice_at, instance.price_per_hour) == (
        "local",
        InstanceState.RUNNING,
        None,
        0.5,
    )
    assert began <= instance.launched_at <= time.time()
    assert (cluster.directory(id_).path / "greeting").read_text() == f"hello {id_}\n"
    assert set(processes) <= processes_of(id_, cluster.machine(id_))


def test_machine_does_not_inherit_variables_of_the_stack(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VCASGD_TOKEN", "secret")
    boot = Boot(("sh", "-c", "env > seen; echo > ready; exec sleep 300"), {"VCASGD_CLUSTER": "c"})
    (id_,) = cluster.launch(boot=boot)
    path = cluster.directory(id_).path
    cluster.eventually((path / "ready").exists)
    seen = [line for line in (path / "seen").read_text().splitlines() if line.startswith("VCASGD")]
    assert sorted(seen) == [
        "VCASGD_CLUSTER=c",
        f"VCASGD_INSTANCE_ID={id_}",
        f"VCASGD_NOTICE_FILE={path / 'notice'}",
    ]
    assert not (path / "boot.json").exists()


def test_boot_hides_values_in_repr() -> None:
    assert "secret" not in repr(Boot(("run",), {"PASSWORD": "secret"}))


def test_eviction_gives_notice(cluster: Cluster) -> None:
    id_, processes = cluster.launch_ready()
    notices = FileNotices(cluster.directory(id_).notice_file)
    assert notices.poll() is None

    began = time.time()
    cluster.another().evict(id_, 600)
    ended = time.time()
    notice = cluster.eventually(notices.poll)
    assert isinstance(notice, Notice)
    assert notice.kind == "terminate"
    assert notice.at is not None
    assert began + 600 <= notice.at <= ended + 600
    assert cluster.state(id_) is InstanceState.LEAVING
    assert all(process.alive() for process in processes)


def test_machine_is_gone_at_the_end_of_its_notice(cluster: Cluster) -> None:
    id_, processes = cluster.launch_ready()

    began = time.time()
    cluster.another().evict(id_, 1.0)

    cluster.await_death(processes)
    assert began + 1.0 <= time.time()
    assert cluster.state(id_) is None


def test_first_notice_is_kept(cluster: Cluster) -> None:
    id_, _ = cluster.launch_ready()
    cluster.provider.evict(id_, 60)
    first = cluster.instance(id_)
    cluster.provider.evict(id_, 0)
    assert cluster.instance(id_) == first


def test_default_notice_is_that_of_the_pool(cluster: Cluster) -> None:
    id_, _ = cluster.launch_ready()
    began = time.time()
    cluster.provider.evict(id_)
    ended = time.time()
    instance = cluster.instance(id_)
    assert instance is not None
    assert instance.notice_at is not None
    assert began <= instance.notice_at - POOL.notice_seconds <= ended


def test_hung_machine_is_ended_after_its_notice(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vcasgd.fleet.providers.local.directory.NOTICE_SLACK_SECONDS", 0.2)
    id_, processes = cluster.launch_ready()
    os.kill(cluster.machine(id_).pid, signal.SIGSTOP)
    cluster.provider.evict(id_, 0.1)
    cluster.await_state(id_, None)
    cluster.await_death(processes)


@pytest.mark.parametrize("way", ["kill", "terminate"])
def test_no_process_of_an_ended_machine_survives(cluster: Cluster, way: str) -> None:
    id_, processes = cluster.launch_ready()
    getattr(cluster.another(), way)(id_)
    assert not [process for process in processes if process.alive()]
    assert processes_of(id_, processes[0]) == set()
    assert cluster.provider.instances() == []


def test_repeated_and_unknown_orders_have_no_effect(cluster: Cluster) -> None:
    id_, _ = cluster.launch_ready()
    for name in (id_, id_, "local-unknown"):
        cluster.provider.terminate(name)
        cluster.provider.kill(name)
        cluster.provider.evict(name)


def test_machine_whose_own_process_was_killed_is_cleaned_up(cluster: Cluster) -> None:
    id_, processes = cluster.launch_ready()
    processes[0].kill()
    cluster.await_state(id_, None)
    # The process without a marker also left the session, and the tree ended with the machine.
    cluster.await_death(processes[:3])
    processes[3].kill()


def test_machine_ends_all_its_processes_on_sigterm(cluster: Cluster) -> None:
    _, processes = cluster.launch_ready()
    os.kill(processes[0].pid, signal.SIGTERM)
    cluster.await_death(processes)


def test_machine_ends_with_its_boot_command(cluster: Cluster) -> None:
    (id_,) = cluster.launch(boot=Boot(("sh", "-c", "setsid sleep 300 & exit 3")))
    cluster.await_state(id_, None)
    assert processes_of(id_, None) == set()
    condemned = (cluster.directory(id_).path / "condemned.json").read_text()
    assert "boot command ended with status 3" in condemned


def test_machines_share_what_they_import(cluster: Cluster, tmp_path: Path) -> None:
    # Given machines whose command needs a module
    (tmp_path / "command.py").write_text(FORKED)
    env = {"PYTHONPATH": str(tmp_path), "GREETING": "hello {instance_id}"}
    boot = Boot((PYTHON, "-m", "command", "argument"), env, imports=("wave",))

    # Then each finds it imported, although no machine has imported it
    ids = cluster.launch(2, boot=boot)
    for id_ in ids:
        ready = cluster.directory(id_).path / "ready"
        cluster.eventually(ready.exists)
        assert ready.read_text() == f"True ['argument'] hello {id_} {id_}"
        assert cluster.state(id_) is InstanceState.RUNNING

    # And they outlive the provider, and end alone, with all of their processes
    cluster.provider.close()
    first, second = (cluster.provider.processes(id_) for id_ in ids)
    assert (len(first), len(second)) == (3, 3)
    os.kill(cluster.machine(ids[0]).pid, signal.SIGKILL)
    cluster.await_state(ids[0], None)
    cluster.await_death(list(first))
    assert all(process.alive() for process in second)


def test_invalid_command_ends_the_machine(cluster: Cluster) -> None:
    (id_,) = cluster.launch(boot=Boot(("/does/not/exist",)))
    cluster.await_state(id_, None)
    cluster.eventually(lambda: "/does/not/exist" in cluster.directory(id_).log.read_text())


def test_a_machine_says_why_it_failed_before_it_is_gone(cluster: Cluster) -> None:
    # A provider that sees that it is gone may kill it at once.
    (id_,) = cluster.launch(boot=Boot(("/does/not/exist",)))
    directory = cluster.directory(id_)
    cluster.eventually(directory.marked_terminated)
    cluster.eventually(lambda: "/does/not/exist" in directory.log.read_text())

    (line,) = [each for each in directory.log.read_text().splitlines() if "ERROR" in each]
    said = datetime.strptime(" ".join(line.split()[:2]), "%Y-%m-%d %H:%M:%S,%f").astimezone()
    gone_at = json.loads((directory.path / "condemned.json").read_text())["at"]
    assert said.timestamp() <= gone_at


def test_slow_boot(cluster: Cluster) -> None:
    cluster.provider.override(boot_seconds=2.0)
    (id_,) = cluster.launch()
    cluster.await_state(id_, InstanceState.RUNNING)
    instance = cluster.instance(id_)
    assert instance is not None
    assert time.time() >= instance.launched_at + 2.0


def test_eviction_before_the_boot(cluster: Cluster) -> None:
    cluster.provider.override(boot_seconds=60)
    (id_,) = cluster.launch()
    assert cluster.state(id_) is InstanceState.BOOTING
    cluster.provider.evict(id_, 0)
    cluster.await_state(id_, None)
    assert not (cluster.directory(id_).path / "ready").exists()


def test_same_token_launches_once(cluster: Cluster) -> None:
    ids = cluster.launch(2)
    assert cluster.another().launch("local", 2, BOOT, "t1") == ids
    assert cluster.another().launch("local", 1, BOOT, "t1") == ids
    assert {one.id for one in cluster.provider.instances()} == set(ids)


def test_token_stays_used_after_its_machines_are_gone(cluster: Cluster) -> None:
    ids = cluster.launch()
    cluster.provider.kill(ids[0])
    assert cluster.launch() == ids
    assert cluster.provider.instances() == []


def test_concurrent_launches_with_one_token(cluster: Cluster) -> None:
    results: list[list[str]] = []
    threads = [threading.Thread(target=lambda: results.append(cluster.launch(2))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
    assert len(results) == 3
    assert results[0] == results[1] == results[2]
    for id_ in results[0]:
        cluster.await_state(id_, InstanceState.RUNNING)
    assert len(cluster.provider.instances()) == 2


def test_capacity(cluster: Cluster) -> None:
    assert len(cluster.launch(3, "t1")) == 2
    with pytest.raises(NoCapacity, match="2 of 2"):
        cluster.launch(1, "t2")
    assert len(cluster.provider.instances()) == 2


def test_machine_with_a_notice_does_not_count_toward_capacity(cluster: Cluster) -> None:
    first, _ = cluster.launch(2, "t1")
    cluster.provider.evict(first, 60)
    assert len(cluster.launch(1, "t2")) == 1
    with pytest.raises(NoCapacity):
        cluster.launch(1, "t3")


def test_pool_can_be_overridden_at_run_time(cluster: Cluster) -> None:
    cluster.provider.override(capacity=0)
    with pytest.raises(NoCapacity):
        cluster.launch()
    cluster.another().override(capacity=1, price_per_hour=2.0)
    (id_,) = cluster.launch(2)
    instance = cluster.instance(id_)
    assert instance is not None
    assert instance.price_per_hour == 2.0


@pytest.mark.parametrize("text", ["{", "[]", '{"size": 1}', '{"capacity": "many"}'])
def test_invalid_override_is_an_error(cluster: Cluster, text: str) -> None:
    (cluster.home / "pools").mkdir()
    (cluster.home / "pools" / "local.json").write_text(text)
    with pytest.raises(FleetError, match=r"local\.json"):
        cluster.launch()
    (cluster.home / "pools" / "local.json").unlink()


def test_unknown_and_invalid_pool_names(cluster: Cluster) -> None:
    with pytest.raises(FleetError, match="moon"):
        cluster.provider.launch("moon", 1, BOOT, "t1")
    with pytest.raises(SpecError, match="not a valid pool name"):
        LocalPool("../elsewhere", 1)


def test_other_clusters_are_not_touched(cluster: Cluster) -> None:
    (id_,) = cluster.launch()
    other = LocalProvider(cluster.home, "other", POOL)
    assert other.instances() == []
    other.kill(id_)
    other.destroy_all()
    assert cluster.state(id_) is not None


def test_machines_end_with_the_stack_that_owns_them(
    cluster: Cluster, holder: subprocess.Popen[str]
) -> None:
    cluster.provider = cluster.another(owner_grace_seconds=0.8)
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


def test_interrupted_launch_is_completed(cluster: Cluster) -> None:
    (id_,) = cluster.launch()
    cluster.provider.kill(id_)
    directory = cluster.directory(id_)
    for name in ("machine", "condemned", "buried"):
        # A machine that was killed early has not written all of them.
        (directory.path / f"{name}.json").unlink(missing_ok=True)
    (directory.path / "boot.json").write_text('{"argv": ["sleep", "300"], "env": {}}')
    assert cluster.state(id_) is InstanceState.BOOTING

    assert cluster.launch() == [id_]
    cluster.await_state(id_, InstanceState.RUNNING)


def test_interrupted_launch_is_abandoned_in_the_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.provider.override(boot_seconds=300)
    (id_,) = cluster.launch()
    cluster.provider.kill(id_)
    directory = cluster.directory(id_)
    for name in ("machine", "condemned", "buried"):
        # A machine that was killed early has not written all of them.
        (directory.path / f"{name}.json").unlink(missing_ok=True)
    monkeypatch.setattr("vcasgd.fleet.providers.local.directory.START_LIMIT_SECONDS", 0.0)
    assert cluster.state(id_) is None
    assert directory.reaped()


def test_next_launch_removes_unfinished_directories(cluster: Cluster) -> None:
    leftover = cluster.home / "instances" / ".new-abc"
    leftover.mkdir(parents=True)
    (leftover / "instance.json").write_text("{")
    assert cluster.provider.instances() == []
    cluster.launch()
    assert not leftover.exists()


def test_reused_process_number_is_not_the_machine(cluster: Cluster) -> None:
    me = Process.of(os.getpid())
    assert me.alive()
    assert not Process(me.pid, me.started - 1).alive()
    Process(me.pid, me.started - 1).kill()
    assert processes_of("local-unknown", Process(me.pid, me.started - 1)) == set()


def test_logs_of_the_last_dead_machines_are_kept(cluster: Cluster) -> None:
    (id_,) = cluster.launch()
    cluster.provider.kill(id_)
    original = cluster.directory(id_).path
    for index in range(KEPT_DEAD + 3):
        copy = original.with_name(f"local-{index:012x}")
        copy.mkdir()
        for name in ("instance.json", "buried.json"):
            (copy / name).write_bytes((original / name).read_bytes())
    (living,) = cluster.launch(1, "t2")
    cluster.provider.kill(living)
    assert len(list((cluster.home / "instances").glob("local-*"))) == KEPT_DEAD
    assert cluster.directory(living).log.exists()


def test_destroy_all(cluster: Cluster) -> None:
    cluster.launch(2)
    cluster.another().destroy_all()
    assert cluster.provider.instances() == []


def test_failing_interpreter_is_an_error(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(FleetError, match=r"instance\.log"):
        cluster.launch()
    assert cluster.provider.instances() == []


def test_launch_is_spread_over_zones_and_may_be_on_demand(
    tmp_path: Path, eventually: Eventually
) -> None:
    pool = LocalPool(
        "local", 4, 0.1, 0.4, zones=("a", "b"), instance_types=("small", "large"), cpus=2
    )
    provider = LocalProvider(tmp_path, "test", pool, owner_grace_seconds=None)
    try:
        provider.launch("local", 2, BOOT, "spread")
        provider.launch("local", 1, BOOT, "b", zones=["b"], instance_types=["large"], spot=False)
        seen = [
            (one.zone, one.instance_type, one.spot, one.price_per_hour)
            for one in sorted(provider.instances(), key=lambda one: (one.launched_at, one.zone))
        ]
        assert seen == [
            ("a", "small", True, 0.1),
            ("b", "small", True, 0.1),
            ("b", "large", False, 0.4),
        ]
        with pytest.raises(InvalidRequest, match="no zone c"):
            provider.launch("local", 1, BOOT, "c", zones=["c"])
    finally:
        provider.destroy_all()


def test_offers_come_from_the_settings_of_the_pool(cluster: Cluster) -> None:
    (offer,) = cluster.provider.offers("local")
    assert (offer.zone, offer.instance_type, offer.spot) == ("local", "process", True)
    assert (offer.price_per_hour, offer.on_demand_price_per_hour) == (0.5, 0.0)
    with pytest.raises(InvalidRequest, match="no pool 'elsewhere'"):
        cluster.provider.offers("elsewhere")
