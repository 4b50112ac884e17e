"""Measure an idle stack: processor time and memory of each process.

    python benchmarks/idle.py [--seconds 60] [--settle 20]

Starts a stack without jobs and writes ``benchmarks/results/idle.md``. Processor time is that of the
processes alone, so other programs that run disturb it little.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

import machine
from markdown import table
from vcasgd.settings import Settings
from vcasgd.stack import StackState, running

OUT = Path(__file__).resolve().parent / "results" / "idle.md"
MB = 1e6

PAGE = """\
# An idle stack

    {command}

A stack without jobs, {options.seconds:g} s long, {options.settle:g} s after it became ready. Memory
is the proportional set size: a page that processes share counts once in all.

{machine}

{table}
"""


@dataclass(frozen=True)
class Options:
    seconds: float
    settle: float
    out: Path


@dataclass(frozen=True)
class Usage:
    """Usage of one process: processor seconds for each second, bytes, wake-ups each second."""

    name: str
    cores: float
    memory: int
    wakeups: float


def measure(options: Options) -> list[Usage]:
    """Start a stack and return what its processes use."""
    with tempfile.TemporaryDirectory(prefix="vcasgd-idle-") as folder:
        settings = Settings(home=Path(folder), api_port=0)
        with running(settings) as state:
            time.sleep(options.settle)
            return usages(state, options.seconds)


def usages(state: StackState, seconds: float) -> list[Usage]:
    """Return the usage of all processes of a stack. Raises :class:`psutil.Error` if one ends."""
    supervisor = psutil.Process(state.supervisor.pid)
    guardian = supervisor.parent()
    assert guardian is not None
    names = {part.pid: name for name, part in state.parts.items()}
    names |= {supervisor.pid: "supervisor", guardian.pid: "guardian"}
    processes = [guardian, *guardian.children(recursive=True)]
    before = [_counters(each) for each in processes]
    time.sleep(seconds)
    after = [_counters(each) for each in processes]
    return [
        Usage(
            _name(each, names),
            (late[0] - early[0]) / seconds,
            each.memory_full_info().pss,
            (late[1] - early[1]) / seconds,
        )
        for each, early, late in zip(processes, before, after, strict=True)
    ]


def _counters(process: psutil.Process) -> tuple[float, int]:
    times = process.cpu_times()
    return times.user + times.system, process.num_ctx_switches().voluntary


def _name(process: psutil.Process, names: dict[int, str]) -> str:
    own = names.get(process.pid)
    if own is not None:
        return own
    parent = process.parent()
    return f"{_name(parent, names)}: {process.name()}" if parent else process.name()


def report(measured: list[Usage], options: Options) -> str:
    """Return the page."""
    total = Usage(
        "**all**",
        sum(each.cores for each in measured),
        sum(each.memory for each in measured),
        sum(each.wakeups for each in measured),
    )
    rows = [
        [each.name, f"{each.cores:.2%}", f"{each.memory / MB:.0f} MB", f"{each.wakeups:.0f}"]
        for each in [*sorted(measured, key=lambda one: -one.memory), total]
    ]
    return PAGE.format(
        command=f"python benchmarks/idle.py --seconds {options.seconds:g}",
        options=options,
        machine=table(("", ""), machine.describe().items()),
        table=table(("process", "of a core", "memory", "wake-ups per second"), rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = Options(**vars(parser.parse_args()))
    page = report(measure(options), options)
    options.out.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
