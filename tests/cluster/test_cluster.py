"""Real Ray processes that are killed: what survives, and what is reported."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.processes import is_alive, run_program
from support.ray_rig import (
    NAMESPACE,
    PASSWORD,
    TOKEN,
    Driver,
    Rig,
    assert_works,
    running_rig,
    session,
    start_worker,
)
from support.waiting import PATIENCE, await_truth

from vcasgd.fleet.notices import Notice, NoticeKind, write_notice

#: Ids are used once, because the cluster remembers dead machines.
MACHINES = itertools.count()


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with running_rig() as rig:
        yield rig


@pytest.fixture(scope="module")
def driver(rig: Rig) -> Iterator[Driver]:
    """A driver for tests that leave the head alive."""
    driver = Driver(rig)
    yield driver
    driver.end()


@pytest.fixture(scope="module")
def machine(rig: Rig) -> Iterator[str]:
    """The id of a machine for tests that leave it alive."""
    name = f"i-{next(MACHINES)}"
    rig.start_node(name)
    yield name
    rig.kill(name)


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


def listening(leader: int) -> list[tuple[str, int]]:
    """Return the addresses and ports on which the processes of a session listen."""
    return [
        (connection.laddr.ip, connection.laddr.port)
        for process in session(leader)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


@pytest.mark.slow
def test_worker_starts_once_and_stops(rig: Rig, driver: Driver, machine: str) -> None:
    pid = start_worker(rig, driver, machine)

    # A second request has no effect
    driver.start(machine)
    assert_works(rig, machine, pid)

    # The Ray of a single machine listens on its loopback only, and has no agents
    for name in (machine, "head"):
        ports = listening(rig.processes[name].pid)
        assert ports
        assert all(address.endswith("127.0.0.1") for address, _ in ports), ports
        commands = [" ".join(each.cmdline()) for each in session(rig.processes[name].pid)]
        assert any("raylet/raylet" in command.partition(" ")[0] for command in commands)
        assert not any("Agent" in command or "/dashboard/" in command.partition(" --")[0]
                       for command in commands)  # fmt: skip

    driver.stop(machine)
    await_truth(lambda: not is_alive(pid))
    assert driver.state(machine) is None
    driver.stop(machine)

    # Its name can be used again
    assert start_worker(rig, driver, machine) != pid


@pytest.mark.slow
def test_workers_that_end_are_reported_and_start_again(
    rig: Rig, driver: Driver, machine: str
) -> None:
    pid = start_worker(rig, driver, machine)

    # When its process is killed
    os.kill(pid, signal.SIGKILL)

    # Then its end is reported, and it can be started again
    await_truth(lambda: not driver.state(machine))
    again = start_worker(rig, driver, machine)
    assert again != pid

    # Nor does it survive the process that runs the workers of its machine
    os.kill(runner(rig, machine), signal.SIGKILL)
    await_truth(lambda: not is_alive(again))
    await_truth(lambda: not driver.state(machine))
    assert start_worker(rig, driver, machine) != again


def runner(rig: Rig, machine: str) -> int:
    """Return the process of Ray that runs the workers of a machine."""
    processes = session(rig.processes[machine].pid)
    (found,) = (each.pid for each in processes if each.name().startswith("ray::Runner"))
    return found


@pytest.mark.ci
@pytest.mark.slow
def test_orders_that_return_to_what_a_machine_had_confirmed(
    rig: Rig, driver: Driver, start_node: Callable[[], str]
) -> None:
    # Given a machine that has confirmed that it has no worker, and whose runner stands still
    machine = start_node()
    leader = rig.processes[machine].pid
    start_worker(rig, driver, machine)
    driver.stop(machine)
    await_truth(lambda: driver.state(machine) is None)
    present = {each.pid for each in session(leader)}
    stopped = runner(rig, machine)
    os.kill(stopped, signal.SIGSTOP)

    # When a worker is ordered and canceled, and the runner goes on and receives both orders
    driver.start(machine)
    driver.stop(machine)
    write_notice(rig.notice_file(machine), NoticeKind.REBALANCE, None)
    os.kill(stopped, signal.SIGCONT)
    await_truth(lambda: machine in driver.see().notices)

    # Then no worker stays
    await_truth(lambda: {each.pid for each in session(leader)} <= present)


@pytest.mark.slow
def test_a_machine_without_a_worker_reports_its_notices(
    rig: Rig, driver: Driver, machine: str
) -> None:
    await_truth(lambda: driver.has(machine))
    driver.stop(machine)
    await_truth(lambda: driver.state(machine) is None)
    assert machine not in driver.see().notices

    write_notice(rig.notice_file(machine), NoticeKind.REBALANCE, None)
    await_truth(lambda: machine in driver.see().notices)
    assert driver.see().notices[machine] == Notice(NoticeKind.REBALANCE, None)

    write_notice(rig.notice_file(machine), NoticeKind.TERMINATE, 100.0)
    await_truth(lambda: driver.see().notices[machine].kind is NoticeKind.TERMINATE)
    assert driver.see().notices[machine].at == pytest.approx(time.time() + 100, abs=PATIENCE)


@pytest.mark.slow
def test_no_secret_on_any_command_line(rig: Rig, driver: Driver) -> None:
    driver.see()
    for process in session(rig.processes["head"].pid):
        line = " ".join(process.cmdline())
        assert PASSWORD not in line
        assert TOKEN not in line


@pytest.mark.slow
def test_client_without_the_token_is_rejected(rig: Rig, driver: Driver) -> None:
    driver.see()
    stranger = f"""
from vcasgd.cluster.driver import Cluster
Cluster.connect("{rig.address}", "{NAMESPACE}", timeout=5)
"""
    done = run_program([sys.executable, "-c", stranger])
    assert "ClusterError" in done.stderr


@pytest.mark.slow
def test_files_of_ray_stay_in_its_folder(rig: Rig, driver: Driver) -> None:
    driver.see()
    head = session(rig.processes["head"].pid)
    used = {Path(file.path) for process in head for file in process.open_files()}
    assert not {path for path in used if not path.is_relative_to(rig.folder)}


@pytest.mark.extended
@pytest.mark.slow
def test_ledger_head_and_a_machine_can_die_at_once(rig: Rig, start_node: Callable[[], str]) -> None:
    driver, survivor, victim = Driver(rig), start_node(), start_node()
    pid = start_worker(rig, driver, survivor)
    start_worker(rig, driver, victim)

    rig.kill("ledger", "head", victim)
    driver.end()
    rig.start_ledger()
    rig.start_head()

    driver = Driver(rig)
    await_truth(lambda: not driver.has(victim))
    assert driver.state(victim) is None
    driver.start(victim)
    assert driver.state(victim) is None
    assert driver.state(survivor)
    assert_works(rig, survivor, pid)
    driver.end()
