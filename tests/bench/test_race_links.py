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
from support.waiting import PATIENCE

RACE = Path(__file__).resolve().parents[2] / "benchmarks" / "race"
RATE, DELAY = 100_000.0, 0.1


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(RACE))
    yield importlib.import_module("switch")
    for name in ("switch", "links"):
        sys.modules.pop(name, None)


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
        second.command([sys.executable, "-c", {sender!r}, first.address]), check=True, timeout=240
    )
    receiver.wait(240)
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
        capture_output=True, text=True, check=True, timeout=PATIENCE,
    )  # fmt: skip

    (name, seconds), (carried,) = (line.split() for line in done.stdout.splitlines())
    # A megabyte at 20 Mbit/s, and a delay each way.
    assert 0.46 < float(seconds) < time.monotonic() - started
    assert name == "10.77.0.3"
    assert int(carried) > 10**6
