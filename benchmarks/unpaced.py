"""Samples per second of workers without a pace, against plain PyTorch loops in as many processes.

    python benchmarks/unpaced.py [--runs 3] [--seconds 60] [--data mnist.npz]

Both train the race's convolutional network on MNIST, and take turns. Each process has one thread,
so four of them keep two processors busy. Writes ``benchmarks/results/unpaced.md``. Stop other
programs before you run it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

import machine
from idle import usages
from markdown import table
from vcasgd.client import Client
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, running

HERE = Path(__file__).resolve().parent
RACE_WORKERS = HERE / "race" / "workers"
sys.path.append(str(RACE_WORKERS))

from cnn import DigitSteps  # noqa: E402

PROCESSES, BATCH = 4, 64
#: Seconds for plain processes to import torch and load the data.
START_SECONDS = 15.0
#: Seconds from the moment when all workers push until the measurement, in which they choose how
#: long their rounds are.
SETTLE_SECONDS = 20.0
READY_SECONDS = 180.0
POLL_SECONDS = 0.2
#: Least share of the processors of a process in the table.
MIN_SHARE = 0.001
PLAIN = "plain loops"
#: Fields of a job besides those of all jobs, by its row in the table.
JOBS: dict[str, dict[str, Any]] = {
    "vcasgd, `push_every: 20`": {"push_every": 20},
    "vcasgd, rounds as by default": {},
}

PAGE = """\
# Workers on busy processors

    {command}

{processes} processes with one thread each train the network of [the race](race.md) on MNIST,
without a pace, in batches of {batch}: plain PyTorch loops that exchange nothing, and the workers of
a job on a stack of its own, whose samples count when they are in the model. The stack's servers and
its controller share the processors with the workers. They take turns, {seconds:g} s each.

{machine}

{table}

Processor time of the job's stack, as a share of what the processors have: medians of the runs.

{shares}
"""


def plain(data: Path, seconds: float) -> float:
    """Return the samples per second of plain loops."""
    begin = time.time() + START_SECONDS
    with get_context("spawn").Pool(PROCESSES) as pool:
        spans = [(str(data), seed, begin, begin + seconds) for seed in range(PROCESSES)]
        return sum(pool.starmap(_loop, spans)) / seconds


def _loop(data: str, seed: int, begin: float, end: float) -> int:
    """Train until ``end``, and return the samples since ``begin``."""
    torch.set_num_threads(1)
    steps, samples = DigitSteps(Path(data), BATCH, seed), 0
    if time.time() >= begin:
        raise RuntimeError(f"the data took longer to load than {START_SECONDS:g} s")
    while (now := time.time()) < end:
        steps.optimizer.zero_grad()
        steps.loss(steps.model).backward()
        steps.optimizer.step()
        samples += BATCH if now >= begin else 0
    return samples


@dataclass(frozen=True)
class Measured:
    """Samples per second that came into a job's model, and shares of all processors by process."""

    rate: float
    shares: dict[str, float]


def workers(data: Path, seconds: float, more: dict[str, Any]) -> Measured:
    """Measure a job on a stack of its own."""
    with tempfile.TemporaryDirectory(prefix="vcasgd-unpaced-") as folder:
        settings = Settings(home=Path(folder), api_port=0, local_capacity=PROCESSES)
        with running(settings) as state:
            token = StackHome(settings.home_path).token() or ""
            with Client(state.api_url, token) as client:
                job = client.submit_directory(_spec(data, Path(folder), more)).id
                _await_pushes(client, job)
                time.sleep(SETTLE_SECONDS)
                before, since = client.job(job).progress.samples_applied, time.monotonic()
                used = usages(state, seconds)
                after, until = client.job(job).progress.samples_applied, time.monotonic()
    shares: Counter[str] = Counter()
    for each in used:
        shares[each.name] += each.cores / (os.cpu_count() or 1)
    return Measured((after - before) / (until - since), dict(shares))


def _spec(data: Path, folder: Path, more: dict[str, Any]) -> JobSpec:
    return JobSpec.parse(
        {
            "name": "unpaced",
            "task": "raced_task:RacedMnist",
            "working_dir": str(RACE_WORKERS),
            "args": {
                "data": str(data),
                "folder": str(folder),
                "pace": 0.0,
                # Each worker trains its part of a batch in a step.
                "batch_size": BATCH * PROCESSES,
            },
            # More than it makes.
            "epochs": 10_000,
            "workers": {"min": PROCESSES, "max": PROCESSES},
            **more,
        }
    )


def _await_pushes(client: Client, job: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while sum(bool(each.pushes) for each in client.job(job).workers()) < PROCESSES:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all workers pushed within {READY_SECONDS:g} s")
        time.sleep(POLL_SECONDS)


def report(
    rates: dict[str, list[float]],
    shares: dict[str, list[dict[str, float]]],
    seconds: float,
    command: str,
) -> str:
    """Return the page; ``rates`` are samples per second of each run, ``shares`` by process."""
    rows = []
    for name, values in rates.items():
        parts = [own / loops for own, loops in zip(values, rates[PLAIN], strict=True)]
        shown = f"{median(parts):.2f} ({', '.join(f'{each:.2f}' for each in parts)})"
        each_run = ", ".join(f"{each:,.0f}" for each in values)
        rows.append([name, f"{median(values):,.0f} ({each_run})", "1" if name == PLAIN else shown])
    return PAGE.format(
        command=command,
        processes=PROCESSES,
        batch=BATCH,
        seconds=seconds,
        machine=table(("", ""), machine.describe().items()),
        table=table(("", "samples/s: median (each run)", "of plain loops, in pairs"), rows),
        shares=table(("process", *shares), _shares(shares)),
    )


def _shares(runs: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    """Return rows for the processes that have a share worth mentioning with any job."""
    names = {name for each in runs.values() for run in each for name in run}
    medians = {
        name: [median(run.get(name, 0.0) for run in each) for each in runs.values()]
        for name in names
    }
    shown = [name for name in names if max(medians[name]) >= MIN_SHARE]
    shown.sort(key=lambda name: -max(medians[name]))
    return [[name, *(f"{share:.1%}" for share in medians[name])] for name in shown]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--data", type=Path, default=HERE.parent / "examples" / "mnist" / "data" / "mnist.npz"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "unpaced.md")
    given = parser.parse_args()
    command = f"python benchmarks/unpaced.py --runs {given.runs} --seconds {given.seconds:g}"
    data = given.data.resolve(strict=True)
    rates: dict[str, list[float]] = {PLAIN: [], **{name: [] for name in JOBS}}
    shares: dict[str, list[dict[str, float]]] = {name: [] for name in JOBS}
    for _ in range(given.runs):
        rates[PLAIN].append(plain(data, given.seconds))
        for name, more in JOBS.items():
            measured = workers(data, given.seconds, more)
            rates[name].append(measured.rate)
            shares[name].append(measured.shares)
        print({name: round(values[-1]) for name, values in rates.items()}, flush=True)
        given.out.write_text(report(rates, shares, given.seconds, command))


if __name__ == "__main__":
    main()
