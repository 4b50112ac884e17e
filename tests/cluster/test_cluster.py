"""Real Ray processes that are killed: what survives, and what is reported."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.metadata import Metadata, MetadataServer
from support.ports import free_port
from support.ray_rig import (
    COUNT,
    HEARTBEAT,
    HOST,
    NAMESPACE,
    PASSWORD,
    PRELOADED,
    TOKEN,
    WRITE_MODULES,
    Driver,
    Rig,
    alive,
    assert_counts_on,
    session,
    start_counting,
)
from support.waiting import PATIENCE, await_truth

from vcasgd.cluster import ActorState, Cluster, Command, head_command, node_command
from vcasgd.errors import ClusterError

#: Ids are used once, because the cluster remembers dead machines.
MACHINES = itertools.count()
CALL = PATIENCE


# --- without Ray -------------------------------------------------------------------------


def commands(temp_dir: str = "/tmp/v") -> list[Command]:
    head = head_command(
        host=HOST,
        port=1,
        ledger_address="127.0.0.1:2",
        ledger_password=PASSWORD,
        namespace=NAMESPACE,
        temp_dir=Path(temp_dir),
        heartbeat=HEARTBEAT,
        token=TOKEN,
    )
    node = node_command(
        address="10.0.0.1:1",
        machine_id="i",
        cpus=1.5,
        temp_dir=Path(temp_dir),
        heartbeat=HEARTBEAT,
        labels={"pool": "p"},
        token=TOKEN,
    )
    return [head, node]


def test_secrets_are_in_the_environment_and_in_no_repr() -> None:
    for command in commands():
        assert TOKEN in command.env.values()
        for secret in (PASSWORD, TOKEN):
            assert secret not in repr(command)
            assert secret not in " ".join(command.argv)
    assert PASSWORD in commands()[0].env.values()


def test_folder_too_long_for_sockets_is_rejected() -> None:
    with pytest.raises(ClusterError, match="at most 37 bytes"):
        commands("/tmp/" + "x" * 40)


def test_health_checks_follow_the_heartbeat() -> None:
    for command in commands():
        assert command.env["RAY_health_check_period_ms"] == "1000"


def test_node_without_gpus_hides_those_of_the_host() -> None:
    assert commands()[1].env["CUDA_VISIBLE_DEVICES"] == ""


def test_arguments_must_be_json() -> None:
    with pytest.raises(ClusterError, match="JSON"):
        Cluster(NAMESPACE, CALL, "head").start_worker("i", "w", "m:f", {"x": object()}, {})


def test_connecting_to_a_closed_port_fails_in_time() -> None:
    with pytest.raises(ClusterError, match="no process listens"):
        Cluster.connect(f"{HOST}:{free_port()}", NAMESPACE, timeout=0.5)


# --- with Ray ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    rig = Rig(Path(tempfile.mkdtemp(prefix="v", dir="/tmp")))
    try:
        rig.start_ledger()
        rig.start_head()
        yield rig
    finally:
        rig.close()


@pytest.fixture
def connect(rig: Rig) -> Iterator[Callable[[], Driver]]:
    """Create drivers, one per process of the head."""
    drivers: list[Driver] = []

    def make() -> Driver:
        drivers.append(Driver(rig))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.end()


@pytest.fixture
def start_node(rig: Rig) -> Iterator[Callable[[], str]]:
    """Create machines for this test and return their ids."""
    names: list[str] = []

    def make() -> str:
        names.append(f"i-{next(MACHINES)}")
        rig.start_node(names[-1])
        return names[-1]

    yield make
    rig.kill(*(name for name in names if name in rig.processes))


@pytest.mark.extended
@pytest.mark.slow
def test_node_has_no_agents_and_its_workers_find_modules_imported(
    rig: Rig, connect: Callable[[], Driver], start_node: Callable[[], str]
) -> None:
    driver, machine = connect(), start_node()
    await_truth(lambda: machine in driver.living_machines())
    path = rig.folder / "modules"
    driver.start_worker(machine, "m", WRITE_MODULES, {"path": str(path)}, {})
    await_truth(path.exists)

    assert PRELOADED in path.read_text().split()
    for name in (machine, "head"):
        found = [" ".join(each.cmdline()) for each in session(rig.processes[name].pid)]
        assert any("raylet/raylet" in command.partition(" ")[0] for command in found)
        assert not any("Agent" in command or "/dashboard/" in command.partition(" --")[0]
                       for command in found)  # fmt: skip


def listening(leader: int) -> list[tuple[str, int]]:
    """Return the addresses and ports on which the processes of a session listen."""
    return [
        (connection.laddr.ip, connection.laddr.port)
        for process in session(leader)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


@pytest.mark.slow
def test_worker_starts_once_and_stops(
    rig: Rig, connect: Callable[[], Driver], start_node: Callable[[], str]
) -> None:
    driver, first, second = connect(), start_node(), start_node()

    start_counting(rig, driver, first, "once")
    pid, _ = rig.counter("once") or (0, 0)
    assert driver.workers()["once"].machine_id == first

    await_truth(lambda: second in driver.living_machines())
    # A second request has no effect, whatever its arguments.
    driver.start_worker(second, "once", COUNT, {"path": "elsewhere"}, {})
    assert driver.workers()["once"].machine_id == first
    assert_counts_on(rig, "once", pid, (rig.counter("once") or (0, 0))[1])

    # The Ray of a single machine listens on its loopback only.
    for name in (first, "head"):
        ports = listening(rig.processes[name].pid)
        assert ports
        assert all(address.endswith("127.0.0.1") for address, _ in ports), ports

    driver.stop_worker("once")
    await_truth(lambda: not alive(pid))
    await_truth(lambda: driver.state("once") is ActorState.DEAD)
    driver.stop_worker("once")
    driver.stop_worker("never-started")

    # Its name can be used again, on any machine.
    start_counting(rig, driver, second, "once", until=3)
    await_truth(lambda: driver.state("once") is ActorState.DEAD)

    with pytest.raises(ClusterError, match="no node that is alive"):
        driver.start_worker("unknown", "w", COUNT, {}, {})


@pytest.mark.slow
def test_a_machine_without_a_worker_publishes_its_notices(
    rig: Rig, connect: Callable[[], Driver]
) -> None:
    # Given a machine of AWS that runs no worker
    driver, metadata = connect(), MetadataServer(Metadata("i-spare"))
    metadata.start()
    rig.start_node("i-spare", metadata=metadata.url)
    try:
        await_truth(lambda: "i-spare" in driver.living_machines())
        assert driver.notices() == {}

        # When the cloud recommends leaving it, and then announces its end
        metadata.metadata.recommend_rebalance()
        await_truth(lambda: driver.notices())
        advice = driver.notices()["i-spare"]
        metadata.metadata.notify(4_000_000_000.0)
        await_truth(lambda: driver.notices()["i-spare"].kind == "terminate")

        # Then the driver sees both
        assert (advice.kind, advice.at) == ("rebalance", None)
        assert driver.notices()["i-spare"].at == 4_000_000_000.0
    finally:
        rig.kill("i-spare")
        metadata.stop()


@pytest.mark.slow
def test_no_secret_on_any_command_line(rig: Rig, connect: Callable[[], Driver]) -> None:
    connect().nodes()
    for process in session(rig.processes["head"].pid):
        line = " ".join(process.cmdline())
        assert PASSWORD not in line
        assert TOKEN not in line


@pytest.mark.slow
def test_client_without_the_token_is_rejected(rig: Rig, connect: Callable[[], Driver]) -> None:
    connect().nodes()
    stranger = f"""
from vcasgd.cluster import Cluster
Cluster.connect("{rig.address}", "{NAMESPACE}", timeout=5)
"""
    done = subprocess.run(
        [sys.executable, "-c", stranger], capture_output=True, text=True, timeout=PATIENCE
    )
    assert "ClusterError" in done.stderr


@pytest.mark.ci
@pytest.mark.slow
def test_workers_survive_their_head_and_are_found_again(
    rig: Rig, connect: Callable[[], Driver], start_node: Callable[[], str]
) -> None:
    driver, nodes = connect(), [start_node(), start_node()]
    for node, worker in zip(nodes, ("left", "right"), strict=True):
        start_counting(rig, driver, node, worker)
    before = {worker: rig.counter(worker) or (0, 0) for worker in ("left", "right")}
    assert driver.finds_head()

    rig.kill("head")

    await_truth(lambda: not driver.finds_head())
    for worker, (pid, number) in before.items():
        assert_counts_on(rig, worker, pid, number + 30)

    rig.start_head()
    successor = connect()
    assert successor.living_machines() >= set(nodes)
    assert not driver.finds_head(), "a driver belongs to one life of the head"
    for worker, (pid, _) in before.items():
        assert successor.state(worker) is ActorState.ALIVE
        assert_counts_on(rig, worker, pid, (rig.counter(worker) or (0, 0))[1])
    start_counting(rig, successor, nodes[0], "new")
    successor.stop_worker("left")
    await_truth(lambda: not alive(before["left"][0]))


@pytest.mark.extended
@pytest.mark.slow
def test_killed_instance_is_reported_and_replaced(
    rig: Rig, connect: Callable[[], Driver], start_node: Callable[[], str]
) -> None:
    driver, victim, replacement = connect(), start_node(), start_node()
    start_counting(rig, driver, victim, "doomed")
    await_truth(lambda: replacement in driver.living_machines())
    pid, _ = rig.counter("doomed") or (0, 0)
    leader = rig.processes[victim].pid

    rig.kill(victim)

    assert not alive(pid)
    assert not session(leader)
    await_truth(lambda: victim not in driver.living_machines())
    await_truth(lambda: driver.state("doomed") is ActorState.DEAD)
    with pytest.raises(ClusterError, match="no node that is alive"):
        driver.start_worker(victim, "doomed", COUNT, {}, {})
    start_counting(rig, driver, replacement, "doomed")


@pytest.mark.extended
@pytest.mark.slow
def test_worker_ends_with_its_node(
    rig: Rig, connect: Callable[[], Driver], start_node: Callable[[], str]
) -> None:
    node = start_node()
    start_counting(rig, connect(), node, "orphan")
    pid, _ = rig.counter("orphan") or (0, 0)

    os.kill(rig.processes[node].pid, signal.SIGKILL)

    await_truth(lambda: not alive(pid))


@pytest.mark.extended
@pytest.mark.slow
def test_ledger_head_and_an_instance_can_die_at_once(
    rig: Rig, connect: Callable[[], Driver], start_node: Callable[[], str]
) -> None:
    driver, survivor, victim = connect(), start_node(), start_node()
    start_counting(rig, driver, survivor, "survivor")
    start_counting(rig, driver, victim, "victim")
    pid, number = rig.counter("survivor") or (0, 0)

    rig.kill("ledger", "head", victim)
    driver.end()
    rig.start_ledger()
    rig.start_head()

    driver = connect()
    await_truth(lambda: victim not in driver.living_machines())
    await_truth(lambda: driver.state("victim") is ActorState.DEAD)
    assert survivor in driver.living_machines()
    assert driver.state("survivor") is ActorState.ALIVE
    assert_counts_on(rig, "survivor", pid, number + 10)


@pytest.mark.extended
@pytest.mark.slow
def test_only_the_head_ends_with_its_ledger(
    rig: Rig, connect: Callable[[], Driver], start_node: Callable[[], str]
) -> None:
    driver, node = connect(), start_node()
    start_counting(rig, driver, node, "calm")
    pid, number = rig.counter("calm") or (0, 0)
    head = rig.processes["head"]

    rig.kill("ledger")

    await_truth(lambda: head.poll() is not None)
    rig.kill("head")
    driver.end()
    rig.start_ledger()
    rig.start_head()
    driver = connect()
    assert node in driver.living_machines()
    assert driver.state("calm") is ActorState.ALIVE
    assert_counts_on(rig, "calm", pid, number + 10)


@pytest.mark.slow
def test_files_of_ray_stay_in_its_folder(rig: Rig, connect: Callable[[], Driver]) -> None:
    connect().nodes()
    head = session(rig.processes["head"].pid)
    used = {Path(file.path) for process in head for file in process.open_files()}
    assert not {path for path in used if not path.is_relative_to(rig.folder)}
