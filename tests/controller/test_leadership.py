"""The controller's lease: two controllers never act at the same time."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.children import Process
from support.clocks import SteppingServer
from support.harness import RedisServer
from support.waiting import PATIENCE, await_truth

from vcasgd.controller.fleet.workplaces import Workplaces
from vcasgd.controller.leadership import Leadership
from vcasgd.errors import Fenced, StoreError
from vcasgd.schemas.fleet import WorkerOrder
from vcasgd.schemas.joining import JoinRequest
from vcasgd.settings import Settings
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.keys import CONTROLLER
from vcasgd.store.ledger.control import Control, LaunchRecord
from vcasgd.store.ledger.machines import JoinedMachines, WorkerOrders

HOUR = 3600


@pytest.fixture
def stepping(tmp_path: Path) -> Iterator[SteppingServer]:
    server = SteppingServer(tmp_path / "ledger", durable=False)
    yield server
    server.end()


def leadership(ledger: RedisClient, heartbeat: float = 60.0) -> Leadership:
    return Leadership(Control(ledger), Settings(heartbeat=heartbeat))


def test_a_forward_step_of_the_ledgers_clock_makes_no_two_controllers_act(
    stepping: SteppingServer,
) -> None:
    # Given a controller, and one that stands by
    acting, standby = (leadership(stepping.connection) for _ in range(2))
    acting.renew()
    standby.renew()
    assert acting.sure

    # When the step ends the lease, and the other controller takes it
    stepping.set_clock(HOUR)

    def taken() -> bool:
        standby.renew()
        return stepping.connection.hget(CONTROLLER, "token") == b"2"

    await_truth(taken)

    # Then only one of them acts until the first one asks again
    assert acting.sure
    assert not standby.sure
    acting.renew()
    assert not acting.sure


def test_a_controller_that_saw_its_predecessor_die_acts_at_once(
    stepping: SteppingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("vcasgd.controller.leadership.boot_time", lambda: now[0])
    dead, standby = (leadership(stepping.connection) for _ in range(2))
    dead.renew()

    standby.renew()
    assert not standby.sure

    now[0] += HOUR
    stepping.set_clock(HOUR)
    await_truth(lambda: not Control(stepping.connection).held())
    standby.renew()

    assert not dead.sure
    assert standby.sure


def test_a_controller_follows_one_that_stopped_at_once(
    ledger: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vcasgd.controller.leadership.STOP_SECONDS", PATIENCE)
    stopped, successor = leadership(ledger), leadership(ledger)
    stopped.start()
    stopped.stop()
    assert not stopped.is_alive()

    successor.renew()

    assert not stopped.sure
    assert successor.sure


def test_a_controller_that_never_saw_its_predecessor_waits(ledger: RedisClient) -> None:
    dead, successor = leadership(ledger, 0.05), leadership(ledger)
    dead.renew()
    Control(ledger).release("somebody else")
    await_truth(lambda: not Control(ledger).held())

    successor.renew()

    assert not successor.sure, "the lease may have ended by a step of the clock"


def orders(*workers: str) -> list[WorkerOrder]:
    return [WorkerOrder(worker=each, job="j", start="s", env={}) for each in workers]


def test_a_controller_deposed_between_read_and_write_changes_nothing(
    stepping: SteppingServer,
) -> None:
    # Given a controller that has read a machine's orders to remove a worker from them
    first, second = (leadership(stepping.connection) for _ in range(2))
    first.renew()
    fenced, of_successor = (connect(stepping.url, fence=each.fence) for each in (first, second))
    machine, stored = "join-p-1", WorkerOrders(fenced)
    request = JoinRequest(version="1", host="h", cpus=1, memory_mb=1, machine=machine)
    JoinedMachines(fenced, 8.0).join("p", "0" * 64, "s", None, "p", request)
    JoinedMachines(fenced, 8.0).report(machine, {}, leaving=False)
    stored.set({machine: orders("a.join-p-1", "b.join-p-1")})
    rows, in_pipeline = fenced.client_list(), fenced.pipeline(transaction=True)
    in_pipeline.hset("key", "field", "of the first")
    places = Workplaces(lambda: None, Settings(heartbeat=1.0), fenced)
    places.refresh()

    def taken_over() -> bool:
        second.renew()
        return stepping.connection.hget(CONTROLLER, "token") == b"2"

    stepping.set_clock(HOUR)
    await_truth(taken_over)
    WorkerOrders(of_successor).set({machine: orders("c.join-p-1")})

    # When it goes on after another controller took over and wrote
    with pytest.raises(StoreError):
        places.stop("a.join-p-1")

    # Then its write is refused, and so is each later one, in whatever way it is sent
    assert [each.worker for each in WorkerOrders(of_successor).all()[machine]] == ["c.join-p-1"]
    for write in (
        lambda: stored.set({machine: []}),
        lambda: Control(fenced).set_launches("east", LaunchRecord(launches=1)),
        lambda: Control(fenced).publish({"m": {}}, {}),
        in_pipeline.execute,
    ):
        with pytest.raises(Fenced):
            write()
    assert Control(stepping.connection).launches() == {}
    assert not stepping.connection.exists("key")
    names = {each["name"] for each in stepping.connection.client_list()}
    assert not names & {each["name"] for each in rows if each["name"]}
    first.renew()
    with pytest.raises(Fenced):
        first.check()
    of_successor.connection_pool.disconnect()


@pytest.mark.ci
def test_a_suspended_controller_that_was_replaced_leaves(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "ledger", durable=False)
    (pools := tmp_path / "pools.yaml").write_text("pools: [{name: guests, provider: join}]")
    url = server.url
    env = os.environ | {
        "VCASGD_HOME": str(tmp_path),
        "VCASGD_POOLS": str(pools),
        "VCASGD_LEDGER_URL": url,
        "VCASGD_TENSORS_URL": url,
        "VCASGD_STORAGE_URL": f"file://{tmp_path / 'storage'}",
    }
    argv = [sys.executable, "-m", "vcasgd.controller.main"]
    control = Control(server.connection)
    processes: list[Process] = []

    def start(heartbeat: str) -> Process:
        before, more = control.last_round_at(), {"VCASGD_HEARTBEAT": heartbeat}
        processes.append(Process(argv, tmp_path / f"{len(processes)}.log", env | more))
        await_truth(lambda: control.last_round_at() > before)
        return processes[-1]

    try:
        first = start("0.2")
        os.kill(first.pid, signal.SIGSTOP)
        # Its lease lasts until the first one has seen it.
        second = start("1")
        os.kill(first.pid, signal.SIGCONT)

        assert first.wait() == 1
        assert second.alive
    finally:
        for process in processes:
            process.end()
        server.end()
        sys.stdout.write("".join(log.read_text() for log in tmp_path.glob("*.log")))
