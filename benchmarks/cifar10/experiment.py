"""One run of the experiment: a row's settings, a seed, and what came of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from vcasgd.bench.presence import always, lives, read_counts
from vcasgd.bench.simulation import Conditions, Point, Simulation
from vcasgd.spec import JobSpec
from vcasgd.task import load_task

HERE = Path(__file__).parent
ROWS = HERE / "rows.yaml"
TRACES = HERE / "traces"
#: modelled: of one ResNet-8 on one core
SECONDS_PER_SAMPLE = 0.0005


@dataclass(frozen=True)
class Row:
    """``job``: fields of a job; ``args``: of the task; ``trace``: when machines are there, and how
    many times faster than it was recorded."""

    name: str
    workers: int = 4
    epochs: int = 10
    job: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    trace: str | None = None
    faster: float = 1.0
    spread: float = 0.2

    def spec(self, seed: int) -> JobSpec:
        given: dict[str, Any] = {
            "name": "cifar10",
            "task": "train:Cifar10",
            "working_dir": str(HERE),
            "args": self.args,
            "epochs": self.epochs,
            "subtasks_per_epoch": 50,
            "seed": seed,
            **self.job,
        }
        return JobSpec.parse(given)

    def conditions(self, seed: int) -> Conditions:
        if self.trace is None:
            machines = always(self.workers)
        else:
            counts, gap = read_counts(TRACES / self.trace, self.workers)
            machines = lives(counts, gap / self.faster, seed)
        return Conditions(machines, SECONDS_PER_SAMPLE, self.spread, seed=seed)


def read_rows(path: Path = ROWS) -> dict[str, Row]:
    """All rows by name."""
    given = yaml.safe_load(path.read_text())
    return {name: Row(name, **(fields or {})) for name, fields in given.items()}


def run(
    row: Row, seed: int, *, evaluate_every: int = 1, say: Callable[[Point], None] = lambda _: None
) -> dict[str, Any]:
    """Trains to the end; the outcome with the row's settings, to be kept as JSON."""
    torch.set_num_threads(1)
    spec = row.spec(seed)
    started = time.monotonic()
    outcome = Simulation(
        spec,
        lambda: load_task(spec.task, spec.args, Path(spec.working_dir)),
        row.conditions(seed),
        evaluate_every=evaluate_every,
        say=say,
    ).run()
    return {
        "row": asdict(row),
        "seed": seed,
        "took_seconds": round(time.monotonic() - started, 1),
        "torch": torch.__version__,
        **json.loads(json.dumps(outcome.to_dict())),
    }
