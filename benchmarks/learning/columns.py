"""Tasks and columns of the table, and one run: a task in a column with a seed."""

from __future__ import annotations

import math
import os
import pydoc_data.topics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from plain import train

from vcasgd.fleet.histories import Life, always, lives, read_counts
from vcasgd.simulation.job import Conditions, Simulation
from vcasgd.spec.job import JobSpec, load_job_mapping
from vcasgd.task.task import Task, load_task

HERE = Path(__file__).resolve().parent
TASKS = ("text", "svm", "embeddings", "lstm", "finetune", "mnist", "cifar10", "vae")
SEEDS = (0, 1, 2)
#: More seeds, where rounding alone changes a result by about as much as the targets.
MORE_SEEDS = {"text": range(6), "mnist": range(6)}
#: Default folder of the data sets, and the folder of files that the tasks write.
DATA = HERE / "data"
#: Arguments of tasks that name a file.
FILES = ("data", "cache")
TEXT = "topics.txt"

TRACE = HERE.parent / "cifar10" / "traces" / "aws-v100-4node-us-east-2a-2023-08-03.json"
#: The first day, in which no machine was taken.
TRACE_SKIPPED = 288
#: Local steps of an average machine in one interval of the trace, which has five minutes.
TRACE_STEPS = 1.0
#: Ratio of the fastest machine's speed to the slowest one's, under the trace.
SPEED_RANGE = 4.0
#: Simulated seconds; a local step of an average machine takes one.
LATENCY, FETCH = 0.1, 0.05


@dataclass(frozen=True)
class Column:
    """One way to train. ``workers`` is 0 for a plain loop, which has ``machines`` in parallel."""

    name: str
    title: str
    workers: int = 0
    machines: int = 1
    trace: bool = False

    @property
    def rates(self) -> tuple[float, ...]:
        """Factors of the learning rate, of which the best counts."""
        if self.machines == 1:
            return (1.0,)
        return (1.0, math.sqrt(self.machines), float(self.machines))


COLUMNS = {
    column.name: column
    for column in (
        Column("plain", "plain"),
        Column("workers-1", "1 worker", workers=1),
        Column("workers-2", "2 workers", workers=2),
        Column("workers-4", "4 workers", workers=4),
        Column("workers-8", "8 workers", workers=8),
        Column("trace-4", "4 workers, trace", workers=4, trace=True),
        Column("parallel-2", "data parallel, 2", machines=2),
        Column("parallel-4", "data parallel, 4", machines=4),
        Column("parallel-8", "data parallel, 8", machines=8),
    )
}


@dataclass(frozen=True)
class Run:
    """A cell's run; ``rate`` multiplies the task's learning rate."""

    task: str
    column: str
    seed: int
    rate: float = 1.0

    def __str__(self) -> str:
        rate = "" if self.rate == 1 else f", rate × {self.rate:.3g}"
        return f"{self.task}, {COLUMNS[self.column].title}, seed {self.seed}{rate}"

    @property
    def asynchronous(self) -> bool:
        return COLUMNS[self.column].workers > 0


def seeds_of(task: str) -> Sequence[int]:
    """Return the seeds of a task."""
    return MORE_SEEDS.get(task, SEEDS)


def job_fields(task: str) -> dict[str, Any]:
    """Return the fields of a task's job file, with an absolute ``working_dir``."""
    path = HERE / "tasks" / f"{task}.yaml"
    fields = load_job_mapping(path)
    working_dir = (path.parent / fields.get("working_dir", ".")).resolve()
    return {"args": {}, **fields, "working_dir": str(working_dir)}


def job_spec(run: Run, fields: dict[str, Any]) -> JobSpec:
    """Return the job of an asynchronous run: everything but the workers is a default."""
    workers = COLUMNS[run.column].workers
    return JobSpec.parse({**fields, "seed": run.seed, "workers": {"min": workers, "max": workers}})


def conditions(run: Run, batch: int) -> Conditions:
    """Return the simulated machines of an asynchronous run of a task with this batch size."""
    column = COLUMNS[run.column]
    return Conditions(
        _lives(column, run.seed),
        seconds_per_sample=1 / batch,
        latency=LATENCY,
        seed=run.seed,
        speed_range=SPEED_RANGE if column.trace else 1.0,
        fetch_seconds=FETCH,
    )


def _lives(column: Column, seed: int) -> list[Life]:
    if not column.trace:
        return always(column.workers)
    counts, _ = read_counts(TRACE, column.workers)
    # Twice, because a long job may outlast the trace.
    return lives(counts[TRACE_SKIPPED:] * 2, TRACE_STEPS, seed)


def make_task(fields: dict[str, Any], data: Path) -> Task:
    """Return a task whose files are in ``data``, or in :data:`DATA`."""
    return load_task(fields["task"], task_args(fields, data), Path(fields["working_dir"]))


def task_args(fields: dict[str, Any], data: Path) -> dict[str, Any]:
    """Return the arguments of a task with the paths of its files."""
    return {
        name: str(find(value, data)) if name in FILES else value
        for name, value in fields["args"].items()
    }


def find(name: str, data: Path) -> Path:
    """Return the path of a data file; create it if it is the text."""
    if (data / name).exists():
        return (data / name).resolve()
    if name == TEXT and not (DATA / name).exists():
        write_text(DATA / name)
    if name.endswith(".npz"):
        raise SystemExit(f"{data / name} is missing: see README.md, or choose other --tasks")
    return DATA / name


def write_text(path: Path) -> None:
    """Write the help topics of Python's standard library."""
    path.parent.mkdir(exist_ok=True)
    topics = pydoc_data.topics.topics
    # Several processes may write it at the same time.
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    part.replace(path)


def execute(
    run: Run, data: Path, *, on_point: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Train to the end in this process, with one thread, and return the outcome."""
    torch.set_num_threads(1)
    started, processor = time.monotonic(), time.process_time()
    outcome = (_simulate if run.asynchronous else _train)(run, data, on_point)
    points = outcome["points"]
    return {
        **outcome,
        "metrics": points[-1]["metrics"] if points and not outcome["divergence"] else {},
        "took_seconds": round(time.monotonic() - started, 2),
        "processor_seconds": round(time.process_time() - processor, 2),
    }


def _train(run: Run, data: Path, on_point: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    fields = job_fields(run.task)
    task, machines = make_task(fields, data), COLUMNS[run.column].machines
    training = train(
        task, fields["epochs"], run.seed, machines=machines, rate=run.rate, on_point=on_point
    )
    return asdict(training)


def _simulate(run: Run, data: Path, on_point: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    fields = job_fields(run.task)
    task = make_task(fields, data)
    simulation = Simulation(
        job_spec(run, fields),
        lambda: task,
        conditions(run, task.batch_size),
        on_point=lambda point: on_point(asdict(point)),
    )
    return simulation.run().to_dict()
