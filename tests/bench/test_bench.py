"""Measurements on real processes. The tests check the figures, not the speed."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from support.processes import processes_of
from support.servers import KINDS, require_binary
from support.waiting import PATIENCE, await_truth

from vcasgd.learning.encodings import CODECS

ROOT = Path(__file__).resolve().parents[2]
MEASURE = ("-m", "benchmarks.measure")
ARGV = [sys.executable, *MEASURE, "store", "--size-mb", "1", "--json"]


def output_of(*words: object) -> str:
    """Run a program of the benchmarks, and return what it prints."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def temporary(folder: Path, **more: str) -> dict[str, str]:
    """Return an environment with its own folder for temporary files."""
    return {**os.environ, "TMPDIR": str(folder), **more}


@pytest.fixture
def folder() -> Any:
    # A short path, because paths of sockets have a limit.
    with tempfile.TemporaryDirectory(prefix="vcb-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.ci
def test_what_programs_outside_of_the_package_import_from_it_exists() -> None:
    """Most of them run for minutes, and no test runs them."""
    missing = []
    for folder in ("benchmarks", "docs", "examples", "infra"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vcasgd."):
                    module = importlib.import_module(node.module or "")
                    missing += [
                        f"{file.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}"
                        for alias in node.names
                        if not hasattr(module, alias.name) and not _is_module(module, alias.name)
                    ]
    assert not missing


def _is_module(package: Any, name: str) -> bool:
    is_package = hasattr(package, "__path__")
    return is_package and importlib.util.find_spec(f"{package.__name__}.{name}") is not None


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "codec", "workers", "socket", "nodes"),
    [("valkey", "float32", 2, "tcp", 1), ("redis", "bfloat16", 3, "unix", 2)],
)
def test_bench_store_reports_all_figures_and_cleans_up(
    kind: str, codec: str, workers: int, socket: str, nodes: int, folder: Path
) -> None:
    assert kind in KINDS
    # When the store is measured for a second
    options = {
        "--seconds": "1", "--workers": str(workers), "--codec": codec, "--worker-socket": socket,
        "--memory-mb": "64", "--store-nodes": str(nodes),
    }  # fmt: skip
    process = subprocess.run(
        [*ARGV, *chain(*options.items())],
        env=temporary(folder, VCASGD_REDIS_SERVER=require_binary(kind)),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )

    # Then its figures are complete and consistent
    assert process.returncode == 0, process.stderr[-4000:]
    figures = json.loads(process.stdout)
    assert figures["server"] == kind
    assert figures["updates"] >= 1
    assert figures["rejected"] == 0
    size = (1 << 20) // (2 if codec == "bfloat16" else 1)
    assert (figures["payload_bytes"], figures["fetch_bytes"]) == (size, size)
    assert 0 < figures["publishes_per_s"] <= figures["updates_per_s"] * 1.001
    assert figures["loopback_bytes_per_update"] > 0
    assert 0 < figures["p50_push_to_applied_ms"] <= figures["p99_push_to_applied_ms"]
    servers = {"tensors", "server"}
    if nodes > 1:
        servers = {f"{kind}-{node}" for kind in servers for node in range(nodes)}
    names = {"ledger", *servers, *(f"worker-{number + 1}" for number in range(workers))}
    assert set(figures["processes"]) == names
    assert figures["store_nodes"] == nodes
    for each in figures["processes"].values():
        assert each["baseline_mb"] > 0
        assert 0 < each["resident_min_mb"] <= each["resident_max_mb"]
    # And no process and no file is left
    assert processes_of(folder) == []
    assert list(folder.iterdir()) == []


@pytest.mark.extended
@pytest.mark.slow
def test_interrupted_measurement_cleans_up(folder: Path) -> None:
    # Given a measurement with running workers
    process = subprocess.Popen(
        [*ARGV, "--seconds", "600"],
        env=temporary(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await_truth(lambda: len(list(folder.glob("*/worker-*.tally"))) == 2)

        # When it is interrupted
        process.send_signal(signal.SIGINT)

        # Then it exits with the status for the signal, and nothing is left
        assert process.wait(PATIENCE) == 128 + signal.SIGINT
        assert processes_of(folder) == []
        assert list(folder.iterdir()) == []
    finally:
        process.kill()
        process.wait()


@pytest.mark.ci
def test_every_codec_is_measured() -> None:
    text = output_of(*MEASURE, "codecs", "--size-mb", 1, "--seconds", 0.01, "--json")

    figures = {each["codec"]: each for each in json.loads(text)["codecs"]}
    assert set(figures) == {*CODECS, "rows"}
    shares = {name: each["share_of_float32"] for name, each in figures.items()}
    assert shares == {
        "float32": 1.0,
        "bfloat16": 0.5,
        "int8": pytest.approx(64 / 252, rel=1e-3),
        # Bits of a packed number, for normally distributed ones.
        "int2": pytest.approx(2.09 / 32, rel=1e-2),
        "topk": 1 / 64,
        "partition": pytest.approx(1 / 8, rel=0.02),
        "rows": pytest.approx(1 / 50, rel=0.02),
    }
    assert figures["float32"]["relative_error"] == figures["rows"]["relative_error"] == 0
    assert 0 < figures["bfloat16"]["relative_error"] < figures["int8"]["relative_error"] < 0.01
    assert 0.5 < figures["partition"]["relative_error"] < figures["topk"]["relative_error"] < 1
    assert all(each["encode_gb_s"] > 0 and each["decode_gb_s"] > 0 for each in figures.values())


@pytest.mark.slow
@pytest.mark.extended
def test_control_plane_is_measured_with_simulated_workers() -> None:
    text = output_of(
        *MEASURE, "control", "--workers", 12, "--jobs", 2, "--seconds", 3, "--clients", 2,
        "--finished-jobs", 5, "--lost", 4, "--json",
    )  # fmt: skip

    figures = json.loads(text)
    assert figures["admitted"] == 12
    assert figures["heartbeats_per_second"] > 0
    assert figures["updates_per_second"] > 0
    assert figures["worker_errors"] == 0
    assert figures["api_errors"] == []
    assert figures["fleet_rounds"] > 0
    assert figures["lost_decided_seconds"] <= figures["lost_replaced_seconds"]
    assert figures["cores"].keys() >= {"ledger", "tensors", "server", "api", "controller"}


@pytest.mark.slow
@pytest.mark.extended
def test_rounds_of_real_workers_are_measured() -> None:
    text = output_of("benchmarks/profile/rounds.py", "--workers", 2, "--seconds", 3)

    head, _, _, _, *rows = text.splitlines()
    assert head.endswith(" rounds of 2 workers, milliseconds")
    milliseconds = [float(row.split(" | ")[1]) for row in rows[:-1]]
    assert all(each >= 0 for each in milliseconds)
    assert sum(milliseconds) > 80


@pytest.mark.extended
def test_small_models_are_measured_without_a_gpu(tmp_path: Path) -> None:
    text = output_of("benchmarks/gpu.py", "--small", "--seconds", 2, "--only", "gpt-124m", "lora",
                     "--out", tmp_path / "gpu.md")  # fmt: skip

    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    # Two workers once more from the kill on
    expected = [("gpt-124m", number) for number in (0, 1, 2, 2)]
    expected += [("lora", number) for number in (0, 1, 2)]
    assert [(row["model"], row["workers"]) for row in rows] == expected
    assert all(row["samples_per_second"] > 0 for row in rows)
    assert "| gpt-124m |" in text
