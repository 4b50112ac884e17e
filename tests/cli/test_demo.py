"""The demo: its components without a stack, and one complete run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from safetensors.torch import load_file
from support.processes import processes_of, read_each

from vcasgd.cli.demo import (
    LATEST_EVICTION,
    LATEST_KILL,
    Faults,
    Summary,
)
from vcasgd.cli.follow import JobStatus
from vcasgd.client import Client
from vcasgd.errors import NotFound
from vcasgd.schemas.fleet import EvictionRequested, WorkerRow

#: Seconds for one demo; it takes one minute on an idle machine.
END_SECONDS = 500.0

GOOD = Summary(
    accuracy=0.98,
    seconds=60.0,
    updates_applied=600,
    staleness_mean=2.0,
    staleness_max=5,
    evictions=1,
    kills=1,
    samples_lost=0,
    samples_repeated=0,
    model_path="model.safetensors",
)


@dataclass
class Api:
    """API that records evictions and refuses the first ``refusals`` of them."""

    refusals: int = 0
    evictions: list[tuple[str, bool]] = field(default_factory=list)

    def evict(self, worker: str, *, kill: bool) -> EvictionRequested:
        if self.refusals:
            self.refusals -= 1
            raise NotFound("there is no such worker")
        self.evictions.append((worker, kill))
        return EvictionRequested(id="r", machine=worker.upper(), notice_seconds=None, kill=kill)


def status_of(workers: str, fraction: float, evictions: int = 0, **extra: Any) -> JobStatus:
    rows = [
        WorkerRow(**{"name": name, "job": "j", "machine": name.upper(), "steps": 1, **extra})
        for name in workers
    ]
    job = SimpleNamespace(progress=SimpleNamespace(fraction=fraction), evictions=evictions)
    return cast("JobStatus", SimpleNamespace(job=job, workers=rows))


@pytest.mark.parametrize(
    ("statuses", "refusals", "expected"),
    [
        # One machine is evicted, and another one killed.
        (
            [status_of("abc", 0.1)] * 2 + [status_of("abc", 0.2, 1), status_of("bcd", 0.3, 1)],
            0,
            [("a", False), ("b", True)],
        ),
        # A fault waits until three workers train.
        (
            [
                status_of("ab", 0.1),
                status_of("abc", 0.1, steps=0),
                status_of("", LATEST_EVICTION),
                status_of("abc", 0.1, notice="terminate"),
                status_of("abc", 0.1, leaving="over"),
            ],
            0,
            [],
        ),
        # Late in the job, fewer are enough.
        (
            [
                status_of("a", LATEST_EVICTION),
                status_of("a", 0.4, 1),
                status_of("ab", LATEST_KILL, 1),
            ],
            0,
            [("a", False), ("b", True)],
        ),
        # If one has left, another one is evicted.
        ([status_of("abc", 0.1), status_of("bcd", 0.1)], 1, [("b", False)]),
    ],
)
def test_faults_evict_one_machine_and_then_kill_another(
    statuses: list[JobStatus], refusals: int, expected: list[tuple[str, bool]]
) -> None:
    api = Api(refusals)
    faults = Faults(cast("Client", api))
    for status in statuses:
        faults(status)
    assert api.evictions == expected


def test_summary_lists_each_failed_guarantee() -> None:
    assert GOOD.failures() == []
    for change in (
        {"accuracy": 0.9},
        {"samples_lost": 1},
        {"samples_lost": None},
        {"samples_repeated": 1},
        {"evictions": 0},
        {"kills": 0},
    ):
        assert len(replace(GOOD, **cast("Any", change)).failures()) == 1


class Demo:
    """``vcasgd demo`` in its own process, with temporary files in the test's folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self.model = folder / "model.safetensors"
        command = [sys.executable, "-m", "vcasgd.cli", "demo", "--model", str(self.model)]
        self.process = subprocess.Popen(
            [*command, *options],
            env={**os.environ, "TMPDIR": str(self.scratch), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def await_line(self, text: str) -> None:
        for line in self.process.stdout:
            if text in line:
                return
        pytest.fail(f"it ended before it printed {text!r}")

    def end(self) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=END_SECONDS)
        finally:
            self.process.kill()
        return self.process.returncode, out, err

    def left(self) -> list[str]:
        """Return the names of files and processes that remain."""
        files = [path.name for path in self.scratch.iterdir()]
        return files + read_each(processes_of(self.scratch), psutil.Process.name)


@pytest.mark.extended
def test_demo_keeps_its_guarantees(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--json")
    status, out, err = demo.end()
    assert status == 0, err
    (line,) = out.splitlines()
    summary = Summary(**json.loads(line))
    assert summary.failures() == []
    assert summary.updates_applied > 0
    assert summary.model_path == str(demo.model)
    assert load_file(demo.model)
    assert demo.left() == []


def test_a_model_that_cant_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    demo = Demo(tmp_path, "--model", str(tmp_path / "file" / "model.safetensors"))
    assert demo.end() == (1, "", f"error: {tmp_path / 'file'}: File exists\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "number", "status"),
    [
        ("ledger is ready", signal.SIGINT, 130),
        pytest.param("worker-started", signal.SIGTERM, 143, marks=pytest.mark.extended),
    ],
)
def test_interrupted_demo_leaves_nothing_behind(
    tmp_path: Path, line: str, number: signal.Signals, status: int
) -> None:
    demo = Demo(tmp_path)
    demo.await_line(line)
    demo.process.send_signal(number)
    returned, _, err = demo.end()
    assert (returned, err) == (status, "interrupted; everything is stopped\n")
    assert demo.left() == []
    assert not demo.model.exists()
