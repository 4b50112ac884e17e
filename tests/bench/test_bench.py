"""`vcasgd bench store` on real processes: that it measures what it says, not how fast it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.servers import KINDS, require_binary
from support.waiting import PATIENCE

ARGV = [sys.executable, "-m", "vcasgd.cli", "bench", "store", "--size-mb", "1", "--json"]


def processes_under(folder: Path) -> list[str]:
    """Command lines of processes that have to do with files in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            argv = process.cmdline()
            environment = process.environ()
        except psutil.Error:
            continue
        if process.pid != os.getpid() and str(folder) in f"{argv} {environment}":
            found.append(" ".join(argv))
    return found


def temporary(folder: Path, **more: str) -> dict[str, str]:
    """An environment in which temporary files go to a folder of their own."""
    return {**os.environ, "TMPDIR": str(folder), **more}


@pytest.fixture
def folder() -> Any:
    # short, because there are sockets in it
    with tempfile.TemporaryDirectory(prefix="vcb-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "codec", "workers", "socket", "nodes"),
    [("valkey", "float32", 2, "tcp", 1), ("redis", "bfloat16", 3, "unix", 2)],
)
def test_a_measurement_on_either_server_tells_everything_and_leaves_nothing(
    kind: str, codec: str, workers: int, socket: str, nodes: int, folder: Path
) -> None:
    assert kind in KINDS
    # When the store is measured for a second
    done = subprocess.run(
        [
            *ARGV,
            "--seconds",
            "1",
            "--workers",
            str(workers),
            "--codec",
            codec,
            "--worker-socket",
            socket,
            "--memory-mb",
            "64",
            "--store-nodes",
            str(nodes),
        ],
        env=temporary(folder, VCASGD_REDIS_SERVER=require_binary(kind)),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )

    # Then its figures are there, and fit together
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(done.stdout)
    assert figures["server"] == kind
    assert figures["updates"] >= 1
    assert figures["rejected"] == 0
    size = (1 << 20) // (2 if codec == "bfloat16" else 1)
    assert (figures["payload_bytes"], figures["fetch_bytes"]) == (size, size)
    assert 0 < figures["publishes_per_s"] <= figures["updates_per_s"] * 1.001
    assert figures["update_gb_per_s"] == pytest.approx(
        figures["updates_per_s"] * figures["payload_bytes"] / 1e9
    )
    assert figures["exchanged_gb_per_s"] == pytest.approx(
        figures["update_gb_per_s"] + figures["fetches_per_s"] * figures["fetch_bytes"] / 1e9
    )
    assert figures["wire_fraction"] == pytest.approx(
        figures["exchanged_gb_per_s"] / max(figures["loopback_gb_per_s_each"])
    )
    assert figures["wire_fraction_model"] == pytest.approx(
        figures["exchanged_gb_per_s"] / max(figures["loopback_model_gb_per_s_each"])
    )
    assert figures["loopback_bytes_per_update"] > 0
    assert 0 < figures["p50_push_to_applied_ms"] <= figures["p99_push_to_applied_ms"]
    assert figures["copies_per_update"] > 0
    servers = {"tensors", "server"}
    if nodes > 1:
        servers = {f"{kind}-{node}" for kind in servers for node in range(nodes)}
    names = {"ledger", *servers, *(f"worker-{number + 1}" for number in range(workers))}
    assert set(figures["processes"]) == names
    assert figures["store_nodes"] == nodes
    for each in figures["processes"].values():
        assert each["baseline_mb"] > 0
        assert 0 < each["resident_min_mb"] <= each["resident_max_mb"]
    # and no process and no file is left
    assert processes_under(folder) == []
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_soak_tells_how_memory_grows_in_each_process(folder: Path) -> None:
    done = subprocess.run(
        [*ARGV, "--soak-minutes", "0.2"],
        env=temporary(folder),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    for each in json.loads(done.stdout)["processes"].values():
        assert each["first_mb"] > 0
        assert each["last_mb"] > 0
        assert isinstance(each["slope_mb_per_minute"], float)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_measurement_leaves_nothing(
    number: signal.Signals, folder: Path, eventually: Callable[..., Any]
) -> None:
    # Given a measurement whose workers are at work
    process = subprocess.Popen(
        [*ARGV, "--seconds", "600"],
        env=temporary(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: len(list(folder.glob("*/worker-*.tally"))) == 2)

        # When it is interrupted
        process.send_signal(number)

        # Then it ends with the status of that, and nothing is left
        assert process.wait(PATIENCE) == 128 + number
        assert processes_under(folder) == []
        assert list(folder.iterdir()) == []
    finally:
        process.kill()
        process.wait()
