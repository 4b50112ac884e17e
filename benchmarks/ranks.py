"""Memory of each part of a job whose model is in several processes of one worker.

    python benchmarks/ranks.py [--layers 24] [--width 1024] [--ranks 4]

Trains a GPT in bfloat16 with FSDP2 and AdamW in a stack of its own, on processors: first a tiny
one, whose memory is that of the programs, and then the one that is asked for. A small one on two
machines shows how many bytes each moves in a round, with one process and with several. Writes
``benchmarks/results/ranks.md``. All processes take about sixteen times the bytes of the vector.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import machine
from markdown import table
from vcasgd.client import Client
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState, running

HERE = Path(__file__).resolve().parent
TASKS = HERE / "gpu_tasks"
sys.path.append(str(TASKS))

from gpt_network import Network  # noqa: E402

OUT = HERE / "results" / "ranks.md"
MB = 1_000_000
SAMPLE_SECONDS = 0.2
LIMIT_SECONDS = 3600.0
TINY, SMALL = {"layers": 2, "width": 64}, {"layers": 2, "width": 256}
#: Names of the optimizers, for people.
NAMES = {"adamw": "AdamW", "sgd": "SGD"}
#: Steps of the small one, each of which is a round.
ROUNDS = 64
VOCABULARY, CONTEXT, BATCH = 8192, 32, 8
#: Parts of the job in the order of the table, and sizes of the model that each has.
PREDICTED = {
    "tensors server": "2 versions, 1 or 2 updates, and a pinned version",
    "parameter server": "3",
    "vectors of the exchange": "2, up to 4 of a copy, and 1 while it evaluates",
    "largest process": "its part of 4, and a gathered block",
    "all processes": "4, and a gathered block each",
}

PAGE = """\
# A model in several processes

    {command}

A GPT of {layers} blocks of {width} numbers, {millions:.0f} million parameters, with FSDP2 and
{optimizer} in {ranks} processes of one worker, computing in bfloat16, for {steps} steps of {batch}
texts; one store node, the default rule. Its vector has {vector:.0f} MB, a block {block:.0f} MB.

{machine}

{table}

Memory is the largest proportional set size, and what is in the swap, of samples every {sample:g}
s, without that of the same job with a tiny model; in parentheses, in sizes of the vector. Vectors
of the exchange belong to the machine, and are counted once; in a process are the pieces that it
has mapped. A worker that is alone keeps a copy, which it pushes beside the training: its start,
its end, and two while a version is merged. The job took {seconds:.0f} s.

Bytes of each update of a model of {small:.1f} MB on two machines, in {rounds} rounds of a step, by
the worker that joined last:

{exchanged}
"""


@dataclass(frozen=True)
class Measured:
    """Bytes of each part at most, seconds from the submission to the end, and bytes of a worker for
    each update."""

    peaks: dict[str, float]
    seconds: float
    pushed: float
    fetched: float


def measure(
    args: dict[str, Any], ranks: int, steps: int, machines: int = 1, push_every: int | None = None
) -> Measured:
    """Train in a stack of its own."""
    peaks: defaultdict[str, float] = defaultdict(float)
    #: Updates, and the bytes that were pushed and fetched, by worker.
    moved: dict[str, tuple[int, int, int]] = {}
    with tempfile.TemporaryDirectory(prefix="vcasgd-ranks-") as folder:
        settings = Settings(home=Path(folder), api_port=0, local_capacity=machines)
        with running(settings) as state:
            token = StackHome(settings.home_path).token() or ""
            with Client(state.api_url, token) as client:
                began = time.monotonic()
                job = client.submit_directory(_spec(args, ranks, steps, machines, push_every))
                while not (job := job.refreshed()).over:
                    rows = job.workers()
                    workers = [row.pid for row in rows if row.pid]
                    moved |= {
                        row.name: (row.pushes, row.pushed_bytes or 0, row.fetched_bytes or 0)
                        for row in rows
                        if row.pushes
                    }
                    for part, size in _memory(state, workers).items():
                        peaks[part] = max(peaks[part], size)
                    if time.monotonic() > began + LIMIT_SECONDS:
                        raise TimeoutError(f"the job took longer than {LIMIT_SECONDS:g} s")
                    time.sleep(SAMPLE_SECONDS)
                if job.state != "succeeded":
                    raise RuntimeError(f"the job is {job.state}: {job.reason}")
                # The one that joined last was never alone.
                pushes, pushed, fetched = min(moved.values())
                seconds = time.monotonic() - began
                return Measured(dict(peaks), seconds, pushed / pushes, fetched / pushes)


def _spec(
    args: dict[str, Any], ranks: int, steps: int, machines: int, push_every: int | None
) -> JobSpec:
    more = {"vocabulary": VOCABULARY, "context": CONTEXT, "batch": BATCH}
    return JobSpec.parse(
        {
            "name": "ranks",
            "task": "gpt_in_parts:GptInParts",
            "working_dir": str(TASKS),
            "args": {**args, **more},
            "max_steps": steps,
            "workers": {"min": machines, "max": machines, "gpus": ranks},
            "push_every": push_every,
        }
    )


def _memory(state: StackState, workers: list[int]) -> dict[str, float]:
    """Return the present bytes of each part."""
    parts = state.parts
    found = {
        "tensors server": _pss(parts["tensors"].pid),
        "parameter server": _pss(parts["server"].pid),
    }
    ranks, vectors = [], {}
    for pid in (each for worker in workers for each in _ranks(worker)):
        ranks.append(_pss(pid))
        vectors |= _vectors(pid)
    return found | {
        "vectors of the exchange": sum(vectors.values()),
        "largest process": max(ranks, default=0.0),
        "all processes": sum(ranks),
    }


def _pss(pid: int) -> float:
    try:
        used = psutil.Process(pid).memory_full_info()
        return float(used.pss + used.swap)
    except (psutil.Error, OSError):
        return 0.0  # It has ended.


def _ranks(worker: int) -> list[int]:
    try:
        children = psutil.Process(worker).children()
        further = [each.pid for each in children if "vcasgd.worker.rank" in each.cmdline()]
    except psutil.Error:
        return []
    return [worker, *further]


def _vectors(pid: int) -> dict[int, int]:
    """Return the bytes of the vectors that a process has open, by their inodes."""
    found = {}
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if str(link.readlink()).startswith("/memfd:vcasgd-vector"):
                status = link.stat()
                found[status.st_ino] = status.st_blocks * 512
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--push-every", type=int, help="steps of a push; by default no copy waits")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    described = machine.describe()
    own = {"optimizer": options.optimizer}
    tiny = measure(TINY | own, options.ranks, options.steps)
    print(tiny, flush=True)
    shape = {"layers": options.layers, "width": options.width, **own}
    large = measure(shape, options.ranks, options.steps, push_every=options.push_every)
    print(large, flush=True)
    exchanged = []
    for size in (1, options.ranks):
        moved = measure(SMALL, size, ROUNDS, machines=2, push_every=1)
        print(moved, flush=True)
        exchanged.append((str(size), f"{moved.pushed / MB:.2f} MB", f"{moved.fetched / MB:.2f} MB"))
    network = Network(options.layers, options.width, CONTEXT, VOCABULARY)
    small = Network(**SMALL, context=CONTEXT, vocabulary=VOCABULARY)
    vector = 4 * sum(each.numel() for each in network.parameters())
    block = 4 * sum(each.numel() for each in network.blocks[0].parameters())
    rows = []
    for part, predicted in PREDICTED.items():
        size = large.peaks[part] - tiny.peaks[part]
        shown = f"{size / MB:.0f} MB ({size / vector:.2f})"
        rows.append((part, f"{tiny.peaks[part] / MB:.0f} MB", shown, predicted))
    page = PAGE.format(
        command=" ".join(["python benchmarks/ranks.py", *sys.argv[1:]]),
        **(vars(options) | {"optimizer": NAMES[options.optimizer]}),
        millions=vector / 4e6,
        batch=BATCH,
        vector=vector / MB,
        block=block / MB,
        machine=table(("", ""), described.items()),
        sample=SAMPLE_SECONDS,
        seconds=large.seconds,
        small=4 * sum(each.numel() for each in small.parameters()) / MB,
        rounds=ROUNDS,
        exchanged=table(("processes of a worker", "pushed", "fetched"), exchanged),
        table=table(("", "with a tiny model", "more than that", "expected, in vectors"), rows),
    )
    options.out.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
