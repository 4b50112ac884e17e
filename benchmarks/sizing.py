"""Measure what a model of some size takes: memory of each process, bytes and seconds of exchanges.

    python benchmarks/sizing.py [--sizes 10 100 500] [--rules rounds] [--nodes 1] [--workers 2]
        [--seconds 8]

Workers that don't train exchange updates as fast as they can. Writes
``benchmarks/results/sizing.md``, or another file for ``--out``. Seconds depend on what else runs;
memory and bytes don't. All processes together take up to eleven times the largest size, in MB.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import psutil

import machine
from benchmarks.measure.rig import BenchWorkload, Rig
from markdown import table
from vcasgd.learning.encodings import Float32
from vcasgd.settings import separate_settings

OUT = Path(__file__).resolve().parent / "results" / "sizing.md"
MB = 1_000_000
#: The default, and one whose workers don't wait for each other.
RULES = ("rounds", "async-local-sgd")
#: Updates of each worker before those that count, and fetches whose median is shown.
WARM_UP_UPDATES, FETCHES = 3, 5
LIMIT_SECONDS = 900.0
#: Sizes of the model that all processes need together, and those of each worker, generously.
MODELS, MODELS_OF_WORKER = 6, 3
SAMPLE_SECONDS = 0.1

PAGE = """\
# What a model takes

    {command}

{machine}

Vectors of float32, {nodes}, {workers} updates as fast as possible.
Each worker writes its updates into memory, and has no model, gradients, or optimizer. Other
programs ran at the same time, as the load shows: seconds are upper bounds, while memory and bytes
don't depend on it.

{table}

Memory is the largest proportional set size, with what is swapped out, of samples every {sample:g} s
from the start of the job, without that before the job; in parentheses, in sizes of the model. Of
several servers of a kind, or workers, the largest one counts. "Applied" is the median time from the
moment a worker has an update until it knows that the update is in the published model, while all
workers push. "Fetch" is the median of {fetches} fetches{part} after the workers have stopped.
"""


@dataclass(frozen=True)
class Sizing:
    """Figures of one rule and size.

    Memory is in bytes above that before the job, times in seconds.
    """

    rule: str
    size: int
    memory: dict[str, float]
    push_bytes: int
    fetch_bytes: int
    applied: float
    fetch: float
    updates_per_second: float


def measure(rule: str, megabytes: int, nodes: int, workers: int, seconds: float) -> Sizing:
    """Start all processes, measure, and clean up."""
    workload = BenchWorkload(
        megabytes * MB // 4, workers, "float32", nodes=nodes, fresh=True, rule=rule
    )
    with Rig(workload, separate_settings()) as rig:
        before = {name: pss(pid) for name, pid in rig.servers.items()}
        with sampled(rig) as samples:
            rig.start()
            tallies = rig.tallies
            rig.await_truth(
                lambda: min(each.applied for each in tallies.values()) >= WARM_UP_UPDATES,
                LIMIT_SECONDS,
                "update of every worker",
            )
            first = {name: tally.applied for name, tally in tallies.items()}
            began = time.monotonic()
            rig.await_truth(
                lambda: (
                    time.monotonic() > began + seconds
                    and all(tallies[name].applied > count for name, count in first.items())
                ),
                LIMIT_SECONDS,
                "further update",
            )
            took = time.monotonic() - began
            delays = [tallies[name].delays(count) for name, count in first.items()]
        rig.stop_workers()
        fetch = statistics.median(rig.fetch_seconds() for _ in range(FETCHES))
    # A worker's interpreter and its libraries are its smallest sample.
    memory = {
        name: max(each) - before.get(name, min(each)) for name, each in sorted(samples.items())
    }
    applied = np.concatenate(delays)
    return Sizing(
        rule=rule,
        size=workload.model_bytes,
        memory=memory,
        push_bytes=Float32().encoded_size(workload.floats),
        fetch_bytes=workload.model_bytes,
        applied=float(np.median(applied)),
        fetch=fetch,
        updates_per_second=len(applied) / nodes / took,
    )


@contextmanager
def sampled(rig: Rig) -> Iterator[dict[str, list[float]]]:
    """Sample the memory of all processes until the end of the block."""
    samples: defaultdict[str, list[float]] = defaultdict(list)
    stopped = threading.Event()

    def sample() -> None:
        while not stopped.wait(SAMPLE_SECONDS):
            for name, pid in {**rig.servers, **rig.workers}.items():
                size = pss(pid)
                # An interpreter that has just started has not imported torch yet.
                if name in rig.servers or (name in rig.tallies and rig.tallies[name].baseline):
                    samples[name].append(size)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        stopped.set()
        thread.join()


def pss(pid: int) -> float:
    """Return the proportional set size of a process, and what is swapped out, in bytes."""
    memory = psutil.Process(pid).memory_full_info()
    return float(memory.pss + memory.swap)


def rows(figures: Sequence[Sizing]) -> Iterator[list[str]]:
    """Yield the rows of the report."""
    for each in figures:
        sizes = {
            kind: max(size for name, size in each.memory.items() if name.startswith(kind))
            for kind in ("tensors", "server", "worker", "ledger")
        }
        yield [
            f"`{each.rule}`",
            f"{each.size / MB:g} MB",
            *(f"{size / MB:.0f} MB ({size / each.size:.1f})" for size in sizes.values()),
            f"{each.push_bytes / MB:.1f} MB, {each.fetch_bytes / MB:.1f} MB",
            f"{each.applied:.3f} s",
            f"{each.fetch:.3f} s",
            f"{each.updates_per_second:.2f} /s",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 500])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--nodes", type=int, default=1, help="store nodes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    models = MODELS + MODELS_OF_WORKER * options.workers
    needed = models * max(options.sizes) * MB
    if psutil.virtual_memory().available + psutil.swap_memory().free < needed:
        parser.error(f"this needs {needed / 1e9:.0f} GB of free memory; choose smaller --sizes")
    described = machine.describe()
    figures = []
    for rule, size in product(options.rules, options.sizes):
        figures.append(measure(rule, size, options.nodes, options.workers, options.seconds))
        print(figures[-1], flush=True)
    nodes = options.nodes
    sizes, rules = " ".join(map(str, options.sizes)), " ".join(options.rules)
    heads = ["rule", "model", "tensors server", "parameter server", "worker", "ledger",
             "a push, a fetch", "applied", "fetch", "updates"]  # fmt: skip
    options.out.write_text(
        PAGE.format(
            command=f"python benchmarks/sizing.py --sizes {sizes} --rules {rules} "
            f"--nodes {nodes} --workers {options.workers} --seconds {options.seconds:g}",
            nodes="one store node" if nodes == 1 else f"{nodes} store nodes",
            part="" if nodes == 1 else " of one node's part",
            machine=table(["", ""], described.items()),
            workers="1 worker that exchanges"
            if options.workers == 1
            else f"{options.workers} workers that exchange",
            sample=SAMPLE_SECONDS,
            fetches=FETCHES,
            table=table(heads, rows(figures)),
        )
    )


if __name__ == "__main__":
    main()
