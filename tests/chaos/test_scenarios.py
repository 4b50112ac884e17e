"""Scenarios: files, schedules, what they may cost, and the shipped ones on real stacks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.children import Process as Program
from support.missing import skip_here
from support.waiting import PATIENCE, await_truth

from vcasgd.chaos import faults
from vcasgd.chaos.faults import (
    Clocks,
    freeze,
    full_disk,
    limited_capacity,
    slow_fsync,
    small_disk,
    step_clock,
)
from vcasgd.chaos.network import ControlGroup, PacketFilter, packet_loss
from vcasgd.chaos.scenario import Counts, Expectations, OneWay, Scenario, schedule, shortfalls
from vcasgd.errors import NoCapacity, SpecError, StackError
from vcasgd.fleet.pools import LocalPoolSpec
from vcasgd.fleet.providers.base import Boot
from vcasgd.fleet.providers.local.processes import Process
from vcasgd.fleet.providers.local.provider import LocalProvider

SCENARIOS = Path(__file__).parents[2] / "scenarios"
#: Scenarios that continuous integration runs, because they take less than a minute.
QUICK = ("no-capacity",)
WORKERS = 3
FREEZE = {"what": "freeze", "where": "ledger", "when": 3, "for": 5}
EXPECT = {"max_pause": "10s"}


def scenario(*faults: dict[str, Any], **expect: Any) -> Scenario:
    return Scenario.model_validate({"faults": faults, "expect": {**EXPECT, **expect}})


def load(folder: Path, *faults: dict[str, Any]) -> Scenario:
    file = folder / "scenario.yaml"
    file.write_text(json.dumps({"faults": faults, "expect": EXPECT}))
    return Scenario.load(file)


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_scenarios_are_valid(path: Path) -> None:
    assert schedule(Scenario.load(path), WORKERS)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"what": "melt"}, "faults.0.what: must be"),
        ({"where": "moon"}, "faults.0.where: must be"),
        ({"for": None}, "for is required with what: freeze"),
        ({"for": -1}, "must be longer than 0 seconds"),
        ({"what": "kill"}, "for has no effect here; remove it"),
        ({"times": 2}, "every is required with times"),
        ({"times": 2, "every": 5}, "every must be longer than for"),
        ({"what": "slow-fsync"}, "delay is required with what: slow-fsync"),
        ({"what": "slow-fsync", "delay": 1, "where": "api"}, "slow-fsync needs where: ledger"),
        ({"what": "drop"}, "direction is required with what: drop"),
        ({"what": "drop", "direction": "up"}, "faults.0.direction: must be"),
        (
            {"what": "drop", "direction": "to-server", "where": "api"},
            "drop needs where: ledger, tensors",
        ),
        ({"where": "worker"}, "freeze needs where: ledger, tensors, server"),
        ({"what": "evict", "where": "worker", "for": None}, "notice is required"),
        ({"notice": 5}, "notice has no effect here; remove it"),
        ({"machines": 1}, "machines has no effect here; remove it"),
        ({"trace": "trace.json"}, "trace has no effect here; remove it"),
        ({"what": "capacity", "where": "pool"}, "capacity needs either machines or trace"),
        ({"what": "capacity", "where": "pool", "machines": 1, "faster": 2}, "faster has no effect"),
        ({"what": "full-disk"}, "full-disk needs where: storage"),
        ({"what": "step-clock"}, "step-clock needs either ahead or behind"),
        ({"what": "step-clock", "ahead": 60, "behind": 60}, "either ahead or behind"),
        ({"what": "step-clock", "ahead": 60, "where": "pool"}, "step-clock needs where: ledger"),
        ({"ahead": 60}, "ahead has no effect here; remove it"),
        ({"untl": 3}, "there is no such field"),
    ],
)
def test_invalid_faults_are_refused(tmp_path: Path, fault: dict[str, Any], message: str) -> None:
    fields = {name: value for name, value in {**FREEZE, **fault}.items() if value is not None}
    with pytest.raises(SpecError) as caught:
        load(tmp_path, fields)

    assert message in str(caught.value)
    assert str(caught.value.details["field"]).startswith("faults")


def test_schedule_is_in_order_of_time() -> None:
    repeated = {"what": "kill", "where": "worker", "when": "2s", "every": "2s", "times": 3}

    plan = schedule(scenario(FREEZE, {**repeated, "max_pause": 4}), WORKERS)

    assert [(each.at, each.what, each.end) for each in plan] == [
        (2, "kill", 2), (3, "freeze", 8), (4, "kill", 4), (6, "kill", 6),
    ]  # fmt: skip
    assert [each.max_pause for each in plan] == [4, 10, 4, 4]


def test_trace_gives_the_pool_its_machines(tmp_path: Path) -> None:
    trace = {"metadata": {"gap_seconds": 300}, "data": [4, 4, 1, 2, 0, 4]}
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    capacity = {"what": "capacity", "where": "pool", "trace": "trace.json", "skip": "5m",
                "faster": 60, "when": 3, "for": 20}  # fmt: skip

    (injection,) = schedule(load(tmp_path, capacity), WORKERS)

    assert injection.counts == Counts((3, 1, 2, 0), 5.0)
    with pytest.raises(SpecError, match="ends before the fault does"):
        schedule(load(tmp_path, {**capacity, "for": 30}), WORKERS)


def test_shortfalls_name_the_fault_with_a_long_pause() -> None:
    (injection,) = schedule(scenario(FREEZE), WORKERS)
    costs = {"lost_samples": 0, "repeated_samples": 0, "lost_machines": 0}
    found = [
        shortfalls(Expectations.model_validate(EXPECT), **costs, pauses=[(injection, pause)])
        for pause in (10.0, 10.1)
    ]
    assert found == [
        [],
        ["freeze ledger for 5 s: 10.1 s without progress, expected at most 10 s"],
    ]


# -- faults on a process ---------------------------------------------------------------------------

SYNCS = "import os; file = open('synced', 'wb')\nwhile True: os.fsync(file.fileno())"


@pytest.fixture
def syncing(tmp_path: Path) -> Iterator[tuple[Program, Process]]:
    """A process that syncs a file all the time."""
    program = Program([sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{SYNCS}"],
                      tmp_path / "log")  # fmt: skip
    await_truth((tmp_path / "synced").exists)
    yield program, Process.of(program.pid)
    program.end()


def test_freeze_lasts_until_its_end(syncing: tuple[Program, Process]) -> None:
    program, process = syncing

    with freeze("it", lambda: {process}):
        assert program._state() == "T"

    await_truth(lambda: program._state() != "T")


def test_slow_fsync_delays_each_call(syncing: tuple[Program, Process]) -> None:
    _, process = syncing
    try:
        with slow_fsync("it", process, 0.1):
            assert process.alive()
    except StackError as error:
        skip_here(str(error))

    assert process.alive()


# -- clocks ----------------------------------------------------------------------------------------

READS_CLOCK = "import time\nwhile True: print(round(time.time()), flush=True); time.sleep(0.05)"
SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def clocks(tmp_path: Path) -> Clocks:
    try:
        return Clocks(tmp_path / "clocks")
    except StackError as error:
        skip_here(str(error))


def test_a_step_of_a_clock_lasts_until_its_end(tmp_path: Path, clocks: Clocks) -> None:
    with clocks.for_children():
        program = Program([sys.executable, "-c", READS_CLOCK], tmp_path / "log")
    shown = lambda: float((tmp_path / "log").read_text().split()[-1]) - time.time()  # noqa: E731
    await_truth(lambda: bool((tmp_path / "log").read_text()))

    with step_clock("it", clocks, lambda: {Process.of(program.pid)}, -7200):
        await_truth(lambda: abs(shown() + 7200) < 60)

    await_truth(lambda: abs(shown()) < 60)
    program.end()


def test_a_clock_that_is_not_read_did_not_fire(
    tmp_path: Path, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "FIRE_SECONDS", 0.5)
    with clocks.for_children():
        program = Program([sys.executable, "-c", SLEEPS], tmp_path / "log")
    await_truth(lambda: "ready" in (tmp_path / "log").read_text())

    step = step_clock("it", clocks, lambda: {Process.of(program.pid)}, 3600)
    with pytest.raises(StackError, match="did not fire: it did not read its clock"), step:
        pass

    program.end()


# -- faults on a network ---------------------------------------------------------------------------

ECHO = """
import socket, sys
sys.stdin.readline()
server = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while data := server.recv(100):
    server.sendall(data)
"""


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    try:
        group = ControlGroup()
        PacketFilter(group, 1, "to-server").close()
    except StackError as error:
        skip_here(str(error))
    yield group
    group.close()
    assert not group.path.exists()


@pytest.mark.parametrize("direction", ["to-server", "to-worker"])
def test_packets_of_one_process_are_lost_in_one_direction(
    group: ControlGroup, direction: OneWay
) -> None:
    # Given a server that asks two processes, one of which is in a group of its own
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as ends:
        port = server.getsockname()[1]
        argv = [sys.executable, "-c", ECHO, str(port)]
        connections = []
        for confined in (True, False):
            process = ends.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE, text=True))
            ends.callback(process.kill)
            if confined:
                group.take([process.pid])
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
            connections.append(ends.enter_context(server.accept()[0]))
        victim, other = connections
        for connection in connections:
            connection.settimeout(PATIENCE)
            connection.sendall(b"1")
            assert connection.recv(1) == b"1"

        # When the packets of that one are lost
        packets = PacketFilter(group, port, direction)
        assert packets.dropped() == 0
        victim.sendall(b"2")
        await_truth(packets.dropped)

        # Then the other one answers, and that one only afterwards
        other.sendall(b"2")
        assert other.recv(1) == b"2"
        victim.setblocking(False)
        with pytest.raises(BlockingIOError):
            victim.recv(1)
        packets.close()
        victim.settimeout(PATIENCE)
        assert victim.recv(1) == b"2"


def test_a_loss_without_packets_did_not_fire(
    group: ControlGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "FIRE_SECONDS", 0.1)
    loss = packet_loss("it", group, 1, "to-server")
    with pytest.raises(StackError, match="the fault did not fire: no packet of it"), loss:
        pass


# -- faults of machines and disks -----------------------------------------------------------------


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalProvider]:
    """A pool with three machines."""
    home = tmp_path / "home"
    provider = LocalProvider(
        home,
        "c",
        LocalPoolSpec(name="pool", provider="local", max_machines=WORKERS),
        owner_grace_seconds=None,
    )
    provider.launch("pool", WORKERS, Boot(("sleep", "600"), {}), "token")
    await_truth(lambda: len(provider.machines()) == WORKERS)
    yield provider
    provider.terminate(*(one.id for one in provider.machines()))
    provider.close()


def test_capacity_follows_its_counts(pool: LocalProvider) -> None:
    with limited_capacity(pool, Counts((2, 0), 0.1)):
        await_truth(lambda: not pool.machines())
        with pytest.raises(NoCapacity):
            pool.launch("pool", 1, Boot(("sleep", "600"), {}), "refused")

    pool.launch("pool", 1, Boot(("sleep", "600"), {}), "granted")
    await_truth(lambda: len(pool.machines()) == 1)


def test_capacity_that_takes_nothing_did_not_fire(pool: LocalProvider) -> None:
    capacity = limited_capacity(pool, Counts((WORKERS,), 0.1))
    with pytest.raises(StackError, match="the fault did not fire"), capacity:
        pass


def test_full_disk_has_no_space_until_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with ExitStack() as mounted:
        try:
            mounted.enter_context(small_disk(folder))
        except StackError as error:
            skip_here(str(error))
        with full_disk(folder), pytest.raises(OSError, match="No space left"):
            (folder / "more").write_bytes(bytes(2**17))

        (folder / "more").write_bytes(bytes(2**17))
    await_truth(lambda: not (folder / "more").exists())


# -- shipped scenarios -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=path.stem,
            marks=pytest.mark.ci if path.stem in QUICK else pytest.mark.extended,
        )
        for path in sorted(SCENARIOS.glob("*.yaml"))
    ],
)
def test_scenario_costs_no_more_than_expected(path: Path) -> None:
    argv = [sys.executable, "-m", "vcasgd.cli", "chaos", "run", str(path), "--json"]
    done = subprocess.run(
        argv, cwd=SCENARIOS.parent, capture_output=True, text=True, timeout=1100, check=False
    )

    for reason in ("slow-fsync needs strace", "strace did not delay", "drop needs the right",
                   "full-disk needs the right", "step-clock needs a C compiler"):  # fmt: skip
        if reason in done.stdout and os.environ.get("CI") != "true":
            pytest.skip(reason)
    assert done.stdout, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, json.dumps(report, indent=1) + done.stderr[-4000:]
    assert len(report["faults"]) == len(schedule(Scenario.load(path), WORKERS))
    assert report["samples_applied"] + report["samples_skipped"] == report["samples_expected"] > 0
    assert report["samples_lost"] == report["samples_repeated"] == 0
    assert all(fault.get("dropped_packets", 1) > 0 for fault in report["faults"])
