"""``benchmarks/race``: slow links, which a switch between network namespaces makes."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RACE = Path(__file__).resolve().parents[2] / "benchmarks" / "race"
#: 1,000 bytes take 10 ms, and 100 ms from one machine to another.
RATE, DELAY = 100_000.0, 0.1


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(RACE))
    yield importlib.import_module("switch")
    for name in ("switch", "links"):
        sys.modules.pop(name, None)


def make_switch(switch: Any) -> Any:
    """Return a switch with a hub, number 1, and the machines 2 and 3."""
    rates = {1: float("inf"), 2: RATE, 3: RATE}
    devices = {
        number: switch.Device(number, switch.Direction(rate), switch.Direction(rate))
        for number, rate in rates.items()
    }
    return switch.Switch(devices, DELAY)


def packet(target: int, size: int = 1000, *, network: int = 77, version: int = 4) -> bytes:
    header = bytes([version << 4]) + bytes(15) + bytes([10, network, 0, target])
    return header.ljust(size, b".")


def arrivals(made: Any) -> list[tuple[float, int]]:
    """Return when packets arrive at which device, to a millisecond."""
    seen, now = [], 0.0
    while (wait := made.wait(now)) is not None:
        now += wait
        seen += [(round(now, 3), device.file) for device, _ in made.due(now)]
    return seen


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        # Up, over, and down.
        ([(0.0, 2, packet(3))], [(0.12, 3)]),
        # The hub has a delay only.
        ([(0.0, 1, packet(2))], [(0.11, 2)]),
        ([(0.0, 2, packet(1))], [(0.11, 1)]),
        # One after the other on each link, in both directions at the same time.
        ([(0.0, 2, packet(3)), (0.0, 2, packet(3))], [(0.12, 3), (0.13, 3)]),
        ([(0.0, 2, packet(3)), (0.0, 3, packet(2))], [(0.12, 3), (0.12, 2)]),
        ([(0.0, 1, packet(3)), (0.0, 2, packet(3))], [(0.11, 3), (0.12, 3)]),
        # For nobody, or of another kind.
        ([(0.0, 2, packet(9)), (0.0, 2, packet(3, network=78))], []),
        ([(0.0, 2, packet(3, version=6))], []),
    ],
)
def test_packets_take_the_time_of_their_links(
    switch: Any, sent: list[tuple[float, int, bytes]], expected: list[tuple[float, int]]
) -> None:
    made = make_switch(switch)
    for at, source, content in sent:
        made.take(at, made.devices[source], content)

    assert arrivals(made) == expected
    assert made.carried == 1000 * len(expected)


def test_a_full_queue_drops_packets(switch: Any) -> None:
    made = make_switch(switch)
    for _ in range(100):
        made.take(0.0, made.devices[2], packet(3))

    # 200 ms of the queue, and the one that is sent; rounding decides on the last one.
    assert len(arrivals(made)) in (20, 21)


#: Sends a megabyte to another machine, and prints the seconds until it says that it has it.
SENDER = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as sent:
    start = time.monotonic()
    sent.sendall(bytes(10**6))
    sent.shutdown(socket.SHUT_WR)
    sent.recv(1)
    print(socket.gethostname(), time.monotonic() - start)
"""
RECEIVER = """
import socket
with socket.create_server(("", 5000)) as server:
    print("ready", flush=True)
    taken, _ = server.accept()
    while taken.recv(65536):
        pass
    taken.sendall(b"1")
"""
MAIN = """
import subprocess, sys
sys.path.insert(0, {race!r})
from links import Links, LinkSpeed
links = Links(LinkSpeed(mbit=20.0, delay_ms=30.0))
try:
    first, second = links.place(), links.place()
    receiver = subprocess.Popen(
        first.command([sys.executable, "-c", {receiver!r}]), stdout=subprocess.PIPE
    )
    receiver.stdout.readline()
    subprocess.run(
        second.command([sys.executable, "-c", {sender!r}, first.address]), check=True, timeout=30
    )
    receiver.wait(10)
    print(links.carried(), flush=True)
finally:
    links.close()
"""
ISOLATION = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")


def test_a_real_connection_is_as_slow_as_its_links(switch: Any) -> None:
    if subprocess.run([*ISOLATION, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be created here")
    if not switch.DEVICE.exists():
        pytest.skip(f"there is no {switch.DEVICE}")
    script = MAIN.format(race=str(RACE), sender=SENDER, receiver=RECEIVER)

    started = time.monotonic()
    done = subprocess.run(
        [*ISOLATION, sys.executable, "-c", script],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip

    (name, seconds), (carried,) = (line.split() for line in done.stdout.splitlines())
    # A megabyte at 20 Mbit/s, and a delay each way.
    assert 0.46 < float(seconds) < time.monotonic() - started
    assert name == "10.77.0.3"
    assert int(carried) > 10**6
