"""Measurements on real processes. The tests check the figures, not the speed."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.processes import processes_of
from support.servers import require_binary

ROOT = Path(__file__).resolve().parents[2]
MEASURE = ("-m", "benchmarks.measure")


def output_of(*words: object, **env: str) -> str:
    """Run a program of the benchmarks, and return what it prints."""
    argv = [sys.executable, *map(str, words)]
    done = subprocess.run(
        argv, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


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
    kind: str, codec: str, workers: int, socket: str, nodes: int
) -> None:
    # A short path, because paths of sockets have a limit.
    with tempfile.TemporaryDirectory(prefix="vcb-", dir="/tmp") as folder:
        text = output_of(
            *MEASURE, "store", "--size-mb", 1, "--json", "--seconds", 1, "--workers", workers,
            "--codec", codec, "--worker-socket", socket, "--memory-mb", 64, "--store-nodes", nodes,
            TMPDIR=folder, VCASGD_REDIS_SERVER=require_binary(kind),
        )  # fmt: skip
        assert processes_of(Path(folder)) == []
        # torch leaves a folder for code that it compiles.
        assert {each.name.split("_")[0] for each in Path(folder).iterdir()} <= {"torchinductor"}

    figures = json.loads(text)
    assert (figures["server"], figures["store_nodes"], figures["rejected"]) == (kind, nodes, 0)
    size = (1 << 20) // (2 if codec == "bfloat16" else 1)
    assert (figures["payload_bytes"], figures["fetch_bytes"]) == (size, size)
    assert 0 < figures["publishes_per_s"] <= figures["updates_per_s"] * 1.001
    assert figures["loopback_bytes_per_update"] > 0
    assert 0 < figures["p50_push_to_applied_ms"] <= figures["p99_push_to_applied_ms"]
    for each in figures["processes"].values():
        assert each["baseline_mb"] > 0
        assert 0 < each["resident_min_mb"] <= each["resident_max_mb"]


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
