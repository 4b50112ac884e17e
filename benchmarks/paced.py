"""Share of their pace that workers with large vectors reach, with the defaults.

    python benchmarks/paced.py [--rows 31x1 31x2 …] [--seconds 60]

A step takes its time without using the processor, as on a GPU, so what is missing is what the
exchange costs. Writes ``benchmarks/results/paced.md`` after each row. The row with slow links needs
root. Stop other programs before you run it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import machine
from markdown import table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "race"), str(HERE / "race" / "workers"), str(HERE.parent)]

from faults import SLOW  # noqa: E402
from large_vector import PacedVector, trained  # noqa: E402
from links import Links  # noqa: E402
from ours_joined import POOL, Agents  # noqa: E402
from vcasgd.client import Client, Job  # noqa: E402
from vcasgd.schemas.jobs import JobView  # noqa: E402
from vcasgd.settings import Settings  # noqa: E402
from vcasgd.spec.access import Scope  # noqa: E402
from vcasgd.spec.job import JobSpec  # noqa: E402
from vcasgd.stack import StackHome, running  # noqa: E402
from vcasgd.stack.layout import GATEWAY  # noqa: E402

BATCH = 32
READY_SECONDS = 300.0
POLL_SECONDS = 1.0
#: Copies of the vector in all processes, for one worker and for each further one: those of
#: docs/how-to/sizing.md, and the model itself. A row that needs more memory is skipped.
COPIES, COPIES_OF_WORKER = 10, 4


@dataclass(frozen=True)
class Row:
    """A job on a stack of its own."""

    name: str
    millions: float
    step_ms: float
    workers: int
    target: float
    slow_links: bool = False
    nodes: int = 1
    #: Processes of a worker, which share its batches.
    ranks: int = 1

    @property
    def processes(self) -> int:
        return self.workers * self.ranks

    @property
    def pace(self) -> float:
        """Samples per second of workers that exchange nothing."""
        return self.processes * BATCH / self.step_ms * 1000

    @property
    def task_args(self) -> dict[str, Any]:
        return {
            "millions": self.millions,
            "step_ms": self.step_ms,
            "batch_size": BATCH,
            "all_gradients": self.ranks > 1,
        }

    @property
    def needs_gb(self) -> float:
        return self.millions * 4e-3 * (COPIES + COPIES_OF_WORKER * (self.processes - 1))


ROWS = (
    Row("31x1", 31, 53, 1, 0.98),
    Row("31x2", 31, 53, 2, 0.95),
    Row("31x4-slow-links", 31, 53, 4, 0.90, slow_links=True),
    Row("124x1", 124, 53, 1, 0.97),
    Row("124x2", 124, 53, 2, 0.90),
    Row("500x1", 500, 1000, 1, 0.95, nodes=2),
    Row("1000x1", 1000, 1000, 1, 0.95, nodes=2),
    Row("3x1", 3, 500, 1, 0.97),
    Row("3x1-4-ranks", 3, 2000, 1, 0.97, ranks=4),
)

PAGE = """\
# Large vectors at a given pace

    {command}

Each row is a job with the default settings on a stack of its own: a model whose state has so many
millions of float32 numbers, and steps of a batch of {batch} that take their time without using the
processor, as a GPU's do. *Of the pace* are the samples per second that workers trained, from step
to step, over those of steps without anything beside them, in at least {seconds:g} s and {rounds}
rounds. All of them come into the model, some rounds later: a row whose workers gave updates up is
an error.
*Plain loops* are the same of as many ordinary PyTorch loops at once, which exchange nothing, on the
same machine just before. Where a worker has several ranks, which share its batches, they are the
processes of one `DistributedDataParallel`, as torchrun starts them.

{machine}

{table}
"""
HEADS = (
    *("million", "step, ms", "workers", "ranks of each", "links"),
    *("of the pace", "plain loops", "target", "steps in a push", "MB in a push"),
)
#: Rounds that are measured at least; one lasts up to 25 s on slow links.
MIN_ROUNDS = 6
#: Steps of a plain loop before it is measured, and seconds at its pace while it is.
WARM_STEPS, PLAIN_SECONDS = 10, 20.0


@dataclass(frozen=True)
class Measured:
    """``plain`` is the share of the pace of ordinary loops, ``steps`` are the local steps of a
    worker in an update, and ``megabytes`` are what it pushes for one."""

    of_pace: float
    plain: float
    steps: float
    megabytes: float


def measure(row: Row, seconds: float) -> Measured:
    """Train a job on a stack of its own.

    Raises MemoryError if the row needs more memory than is free, TimeoutError if not all workers
    push in time, and RuntimeError if one gives an update up.
    """
    free = psutil.virtual_memory().available / 1e9
    if free < row.needs_gb:
        raise MemoryError(f"needs {row.needs_gb:.0f} GB, {free:.0f} GB are free")
    plain = plain_pace(row)
    with ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="vcasgd-paced-")))
        links = Links(SLOW) if row.slow_links else None
        if links is not None:
            resources.callback(links.close)
        settings = _settings(row, folder, links)
        state = resources.enter_context(running(settings))
        client = Client(state.api_url, StackHome(settings.home_path).token() or "")
        resources.callback(client.close)
        if links is not None:
            token = client.create_token("paced", Scope.JOIN, pool=POOL).token
            url = f"https://{links.hub}:{state.ports[GATEWAY]}"
            agents = Agents(url, token, folder / "agents")
            resources.callback(agents.close)
            for _ in range(row.workers):
                agents.start(links.place())
        counts = folder / "counts"
        counts.mkdir()
        job = client.submit_directory(_spec(row, counts))
        _await_pushes(job, row.workers)
        time.sleep(seconds)
        before, first = trained(counts), job.refreshed()
        last = _watch(job, seconds, first.totals.updates + MIN_ROUNDS * row.workers)
        after = trained(counts)
        if given_up := sum(worker.discarded for worker in job.workers()):
            raise RuntimeError(f"{given_up} updates were given up")
    rates = [
        (after[name][0] - samples) / (after[name][1] - at) for name, (samples, at) in before.items()
    ]
    updates = max(1, last.totals.updates - first.totals.updates)
    applied = last.progress.samples_applied - first.progress.samples_applied
    pushed = last.traffic.pushed_bytes - first.traffic.pushed_bytes
    return Measured(
        *(sum(rates) / row.pace, plain),
        applied * row.workers / updates / BATCH,
        pushed / 1e6 / updates,
    )


def plain_pace(row: Row) -> float:
    """Return the share of a row's pace that ordinary loops reach, a process for each rank."""
    count = row.processes
    with (
        tempfile.TemporaryDirectory(prefix="vcasgd-paced-") as folder,
        multiprocessing.get_context("spawn").Pool(count) as processes,
    ):
        meeting = Path(folder) / "meeting" if row.ranks > 1 else None
        given = [(row, BATCH // count, meeting, rank) for rank in range(count)]
        # One for each process.
        rates = processes.starmap(_plain_rate, given, chunksize=1)
    return sum(rates) / row.pace


def _plain_rate(row: Row, batch_size: int, meeting: Path | None, rank: int) -> float:
    """Train in an ordinary loop; return its samples per second.

    The processes that meet at a file average their gradients.
    """
    torch.set_num_threads(1)
    task = PacedVector(**row.task_args)
    model = task.model()
    if meeting is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=row.ranks)
        model = DistributedDataParallel(model)
    optimizer = task.optimizer(list(model.parameters()))
    # Processes that average gradients make the same number of steps.
    steps = WARM_STEPS + int(PLAIN_SECONDS * row.pace / row.processes / batch_size)
    batches = islice(DataLoader(task.dataset("train"), batch_size, shuffle=True), steps)
    started = 0.0
    for step, batch in enumerate(batches):
        if step == WARM_STEPS:
            started = time.perf_counter()
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    return (steps - WARM_STEPS) * batch_size / (time.perf_counter() - started)


def _settings(row: Row, folder: Path, links: Links | None) -> Settings:
    home = folder / "home"
    if links is None:
        return Settings(home=home, api_port=0, local_capacity=row.workers, store_nodes=row.nodes)
    pools = folder / "pools.yaml"
    pools.write_text(f"pools: [{{name: {POOL}, provider: join}}]\n")
    return Settings(home=home, api_port=0, pools=pools, join_port=0, join_host=links.hub)


def _spec(row: Row, counts: Path) -> JobSpec:
    gpus = {"gpus": row.ranks} if row.ranks > 1 else {}
    return JobSpec.parse(
        {
            "name": "paced",
            "task": "large_vector:PacedVector",
            "working_dir": str(HERE / "race" / "workers"),
            "args": row.task_args | {"counts": str(counts)},
            # More than it makes.
            "epochs": 10_000,
            "workers": {"min": row.workers, "max": row.workers} | gpus,
            "checkpoint": {"every": "1h", "keep": 1},
        }
    )


def _watch(job: Job, seconds: float, updates: int) -> JobView:
    """Return a job's state after so many seconds, and once it has so many updates.

    Raises TimeoutError.
    """
    began = time.monotonic()
    while True:
        time.sleep(POLL_SECONDS)
        view, passed = job.refreshed(), time.monotonic() - began
        if passed >= seconds and view.totals.updates >= updates:
            return view
        if passed > seconds + READY_SECONDS:
            raise TimeoutError(f"no {updates} updates within {passed:.0f} s")


def _await_pushes(job: Job, workers: int) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while sum(bool(worker.pushes) for worker in job.workers()) < workers:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all workers pushed within {READY_SECONDS:g} s")
        time.sleep(POLL_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "paced.md")
    given = parser.parse_args()
    command = (
        f"python benchmarks/paced.py --rows {' '.join(given.rows)} --seconds {given.seconds:g}"
        f" --out benchmarks/results/{given.out.name}"
    )
    rows = []
    for row in ROWS:
        if row.name not in given.rows:
            continue
        try:
            measured = measure(row, given.seconds)
            reached, plain = f"{measured.of_pace:.2f}", f"{measured.plain:.2f}"
            steps, megabytes = f"{measured.steps:.0f}", f"{measured.megabytes:.1f}"
        except MemoryError as error:
            reached, plain, steps, megabytes = str(error), "", "", ""
        links = f"{SLOW.mbit:g} Mbit/s, {2 * SLOW.delay_ms:g} ms" if row.slow_links else "loopback"
        size, step = f"{row.millions:g}", f"{row.step_ms:g}"
        target = f"{row.target:.2f}"
        described = [size, step, str(row.workers), str(row.ranks), links]
        rows.append([*described, reached, plain, target, steps, megabytes])
        print(row.name, reached, plain, steps, megabytes, flush=True)
        page = PAGE.format(
            command=command,
            batch=BATCH,
            seconds=given.seconds,
            rounds=MIN_ROUNDS,
            machine=table(("", ""), machine.describe().items()),
            table=table(HEADS, rows),
        )
        given.out.write_text(page)


if __name__ == "__main__":
    main()
