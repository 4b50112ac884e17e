"""The demo: its parts without a stack, and the whole of it once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from safetensors.torch import load_file

from vcasgd.cli.demo import Summary
from vcasgd.cli.faults import LATEST_EVICTION, LATEST_KILL, Faults
from vcasgd.cli.interrupts import CommandInterrupted, Interrupts
from vcasgd.cli.watch import JobStatus
from vcasgd.client import Client
from vcasgd.errors import NotFound

Eventually = Callable[..., Any]

#: a demo takes one minute where nothing else runs
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
    """Remembers what it was asked to take; the first ``refusals`` times it can't."""

    refusals: int = 0
    taken: list[tuple[str, bool]] = field(default_factory=list)

    def evict(self, worker: str, *, kill: bool) -> dict[str, str]:
        if self.refusals:
            self.refusals -= 1
            raise NotFound("there is no such worker")
        self.taken.append((worker, kill))
        return {"instance": worker.upper()}


def look(workers: str, fraction: float, evictions: int = 0, **extra: Any) -> JobStatus:
    rows = [{"name": name, "instance": name.upper(), "steps": 1, **extra} for name in workers]
    job = SimpleNamespace(progress=SimpleNamespace(fraction=fraction), evictions=evictions)
    return cast("JobStatus", SimpleNamespace(job=job, workers=rows))


def struck(*looks: JobStatus, refusals: int = 0) -> list[tuple[str, bool]]:
    api = Api(refusals)
    faults = Faults(cast("Client", api))
    for each in looks:
        faults(each)
    return api.taken


def test_one_is_evicted_and_when_it_is_gone_another_killed() -> None:
    looks = [look("abc", 0.1), look("abc", 0.1), look("abc", 0.2, 1), look("bcd", 0.3, 1)]
    assert struck(*looks) == [("a", False), ("b", True)]


def test_nobody_is_taken_before_three_work() -> None:
    assert struck(look("ab", 0.1), look("abc", 0.1, steps=0), look("", LATEST_EVICTION)) == []
    assert struck(look("abc", 0.1, notice="terminate"), look("abc", 0.1, leaving="over")) == []


def test_late_in_the_job_fewer_must_do() -> None:
    looks = [look("a", LATEST_EVICTION), look("a", 0.4, 1), look("ab", LATEST_KILL, 1)]
    assert struck(*looks) == [("a", False), ("b", True)]


def test_a_machine_that_was_faster_is_replaced_by_another() -> None:
    assert struck(look("abc", 0.1), look("bcd", 0.1), refusals=1) == [("b", False)]


def test_a_summary_complains_about_each_broken_promise() -> None:
    assert GOOD.complaints() == []
    for change in (
        {"accuracy": 0.9},
        {"samples_lost": 1},
        {"samples_lost": None},
        {"samples_repeated": 1},
        {"evictions": 0},
        {"kills": 0},
    ):
        assert len(replace(GOOD, **cast("Any", change)).complaints()) == 1


def test_signals_wait_until_they_are_allowed() -> None:
    interrupts = Interrupts()
    with interrupts.installed():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(CommandInterrupted) as caught, interrupts.allowed():
            pytest.fail("it was interrupted before")
        signal.raise_signal(signal.SIGINT)
    assert caught.value.exit_status == 143


def test_only_the_first_signal_counts() -> None:
    interrupts = Interrupts()
    with interrupts.installed():
        with pytest.raises(CommandInterrupted) as caught, interrupts.allowed():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert caught.value.exit_status == 130


class Demo:
    """``vcasgd demo`` as its own process, with temporary files in a folder of the test."""

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
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        pytest.fail(f"it ended before it said {text!r}")

    def end(self) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=END_SECONDS)
        finally:
            self.process.kill()
        return self.process.returncode, out, err

    def left(self) -> list[str]:
        """Processes and files."""
        files = [path.name for path in self.scratch.iterdir()]
        return files + [each.name() for each in psutil.process_iter() if self._owns(each)]

    def _owns(self, process: psutil.Process) -> bool:
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False
        return any(str(self.scratch) in word for word in words)


@pytest.mark.slow
def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--json")
    status, out, err = demo.end()
    assert status == 0, err
    (line,) = out.splitlines()
    summary = Summary(**json.loads(line))
    assert summary.complaints() == []
    assert summary.updates_applied > 0
    assert summary.model_path == str(demo.model)
    assert load_file(demo.model)
    assert demo.left() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "number", "status"),
    [("ledger is ready", signal.SIGINT, 130), ("worker-started", signal.SIGTERM, 143)],
)
def test_an_interrupted_demo_leaves_nothing(
    tmp_path: Path, said: str, number: signal.Signals, status: int
) -> None:
    demo = Demo(tmp_path)
    demo.await_line(said)
    demo.process.send_signal(number)
    returned, _, err = demo.end()
    assert (returned, err) == (status, "interrupted; everything is stopped\n")
    assert demo.left() == []
    assert not demo.model.exists()
