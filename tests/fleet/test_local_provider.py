"""Local provider: launches, capacity, and settings of pools, with real processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from support.local_machines import BOOT, LocalCluster
from support.waiting import PATIENCE, await_truth

from vcasgd.errors import FleetError, NoCapacity
from vcasgd.fleet.pools import LocalPoolSpec, LocalTemplate
from vcasgd.fleet.providers.base import PYTHON, Boot
from vcasgd.fleet.providers.local.processes import processes_of
from vcasgd.fleet.providers.local.provider import LocalProvider
from vcasgd.schemas.fleet import MachineState

#: Reports what it finds imported, and starts a process in its own session.
FORKED = """
import os, pathlib, subprocess, sys, time
subprocess.Popen(["setsid", "sleep", "300"])
text = f"{'wave' in sys.modules} {sys.argv[1:]} {os.environ['GREETING']} {pathlib.Path.cwd().name}"
pathlib.Path("ready.new").write_text(text)
pathlib.Path("ready.new").rename("ready")
time.sleep(300)
"""


def test_machine_boots_and_runs_its_command(cluster: LocalCluster) -> None:
    began = time.time()
    id_, processes = cluster.launch_ready()
    machine = cluster.machine(id_)
    assert (machine.pool, machine.state, machine.notice_at, machine.price_per_hour) == (
        "local",
        MachineState.RUNNING,
        None,
        0.5,
    )
    assert began <= machine.launched_at <= time.time()
    assert (cluster.directory(id_).path / "greeting").read_text() == f"hello {id_}\n"
    assert set(processes) <= processes_of(id_, cluster.root(id_))


def test_machine_does_not_inherit_variables_of_the_stack(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VCASGD_TOKEN", "secret")
    boot = Boot(("sh", "-c", "env > seen; echo > ready; exec sleep 300"), {"VCASGD_CLUSTER": "c"})
    (id_,) = cluster.launch(boot=boot)
    path = cluster.directory(id_).path
    await_truth((path / "ready").exists)
    seen = [line for line in (path / "seen").read_text().splitlines() if line.startswith("VCASGD")]
    assert sorted(seen) == [
        "VCASGD_CLUSTER=c",
        f"VCASGD_MACHINE_ID={id_}",
        f"VCASGD_NOTICE_FILE={path / 'notice'}",
    ]
    assert not (path / "boot.json").exists()


def test_boot_hides_values_in_repr() -> None:
    assert "secret" not in repr(Boot(("run",), {"PASSWORD": "secret"}))


def test_machines_share_what_they_import(cluster: LocalCluster, tmp_path: Path) -> None:
    # Given machines whose command needs a module
    (tmp_path / "command.py").write_text(FORKED)
    env = {"PYTHONPATH": str(tmp_path), "GREETING": "hello {machine_id}"}
    boot = Boot((PYTHON, "-m", "command", "argument"), env, imports=("wave",))

    # Then each finds it imported, although no machine has imported it
    ids = cluster.launch(2, boot=boot)
    for id_ in ids:
        ready = cluster.directory(id_).path / "ready"
        await_truth(ready.exists)
        assert ready.read_text() == f"True ['argument'] hello {id_} {id_}"
        cluster.await_state(id_, MachineState.RUNNING)

    # And they outlive the provider, and end alone, with all of their processes
    cluster.provider.close()
    first, second = (cluster.provider.processes(id_) for id_ in ids)
    assert (len(first), len(second)) == (3, 3)
    os.kill(cluster.root(ids[0]).pid, signal.SIGKILL)
    cluster.await_state(ids[0], None)
    cluster.await_death(list(first))
    assert all(process.alive() for process in second)


def test_slow_boot(cluster: LocalCluster) -> None:
    cluster.provider.override(boot_seconds=2.0)
    (id_,) = cluster.launch()
    cluster.await_state(id_, MachineState.RUNNING)
    machine = cluster.machine(id_)
    assert time.time() >= machine.launched_at + 2.0


def test_concurrent_launches_with_one_token(cluster: LocalCluster) -> None:
    results: list[list[str]] = []
    threads = [threading.Thread(target=lambda: results.append(cluster.launch(2))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
    assert len(results) == 3
    assert results[0] == results[1] == results[2]
    for id_ in results[0]:
        cluster.await_state(id_, MachineState.RUNNING)
    assert len(cluster.provider.machines()) == 2


def test_machines_take_turns_over_the_gpus(tmp_path: Path) -> None:
    # Given a computer with three GPUs, and a pool whose machines see two each
    pool = LocalPoolSpec(name="local", provider="local", max_machines=4, gpus=2)
    provider = LocalProvider(tmp_path, "test", pool, devices=("GPU-a", "GPU-b", "GPU-c"))
    program = "echo $CUDA_VISIBLE_DEVICES > new; mv new seen; exec sleep 300"
    boot = Boot(("sh", "-c", program), {"PATH": os.environ["PATH"]})

    def seen(id_: str) -> str:
        file = tmp_path / "machines" / id_ / "seen"
        await_truth(file.exists)
        return file.read_text().strip()

    # Then a GPU gets a second machine only after all have one
    try:
        first, second, third = provider.launch("local", 3, boot, "t1")
        assert [seen(id_) for id_ in (first, second, third)] == [
            "GPU-a,GPU-b",
            "GPU-c,GPU-a",
            "GPU-b,GPU-c",
        ]
        # And a replacement gets those of the machine that it replaces
        provider.terminate(second)
        (replacement,) = provider.launch("local", 1, boot, "t2")
        assert seen(replacement) == "GPU-a,GPU-c"
    finally:
        provider.destroy_all()


def test_machine_with_a_notice_does_not_count_toward_capacity(cluster: LocalCluster) -> None:
    first, _ = cluster.launch(2, "t1")
    cluster.provider.evict(first, 60)
    assert len(cluster.launch(1, "t2")) == 1
    with pytest.raises(NoCapacity, match="2 of 2"):
        cluster.launch(1, "t3")


def test_pool_can_be_overridden_at_run_time(cluster: LocalCluster) -> None:
    cluster.provider.override(capacity=0)
    with pytest.raises(NoCapacity):
        cluster.launch()
    cluster.another().override(capacity=1, price_per_hour=2.0)
    (id_,) = cluster.launch(2)
    machine = cluster.machine(id_)
    assert machine.price_per_hour == 2.0


@pytest.mark.parametrize("text", ["{", "[]", '{"size": 1}', '{"capacity": "many"}'])
def test_invalid_override_is_an_error(cluster: LocalCluster, text: str) -> None:
    (cluster.home / "pools").mkdir()
    (cluster.home / "pools" / "local.json").write_text(text)
    with pytest.raises(FleetError, match=r"local\.json"):
        cluster.launch()
    (cluster.home / "pools" / "local.json").unlink()


def test_interrupted_launch_is_completed(cluster: LocalCluster) -> None:
    (id_,) = cluster.launch()
    cluster.provider.kill(id_)
    directory = cluster.directory(id_)
    for name in ("process", "condemned", "buried"):
        # A machine that was killed early has not written all of them.
        (directory.path / f"{name}.json").unlink(missing_ok=True)
    (directory.path / "boot.json").write_text('{"argv": ["sleep", "300"], "env": {}}')
    assert cluster.state(id_) is MachineState.BOOTING

    assert cluster.launch() == [id_]
    cluster.await_state(id_, MachineState.RUNNING)


def test_interrupted_launch_is_abandoned_in_the_end(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
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


def test_next_launch_removes_unfinished_directories(cluster: LocalCluster) -> None:
    leftover = cluster.home / "machines" / ".new-abc"
    leftover.mkdir(parents=True)
    (leftover / "launch.json").write_text("{")
    assert cluster.provider.machines() == []
    cluster.launch()
    assert not leftover.exists()


def test_failing_interpreter_is_an_error(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(FleetError, match=r"machine\.log"):
        cluster.launch()
    assert cluster.provider.machines() == []


def test_launch_is_spread_over_zones_and_may_be_on_demand(tmp_path: Path) -> None:
    prices = LocalTemplate(price_per_hour=0.1, on_demand_price_per_hour=0.4)
    kinds = {"zones": ("a", "b"), "machine_types": ("small", "large")}
    pool = LocalPoolSpec(
        name="local", provider="local", max_machines=4, template=prices, cpus=2, **kinds
    )
    provider = LocalProvider(tmp_path, "test", pool, owner_grace_seconds=None)
    try:
        provider.launch("local", 2, BOOT, "spread")
        provider.launch("local", 1, BOOT, "b", zones=["b"], machine_types=["large"], spot=False)
        seen = [
            (one.zone, one.machine_type, one.spot, one.price_per_hour)
            for one in sorted(provider.machines(), key=lambda one: (one.launched_at, one.zone))
        ]
        assert seen == [
            ("a", "small", True, 0.1),
            ("b", "small", True, 0.1),
            ("b", "large", False, 0.4),
        ]
    finally:
        provider.destroy_all()
