"""Rows of the experiment, and one run of a row with a seed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from vcasgd.fleet.histories import machines
from vcasgd.simulation.job import Conditions, Point, Simulation
from vcasgd.spec.job import JobSpec
from vcasgd.task.task import load_task

HERE = Path(__file__).resolve().parent
ROWS = HERE / "rows.yaml"
TRACES = HERE / "traces"
#: Simulated training time of an average machine.
SECONDS_PER_SAMPLE = 0.0005


@dataclass(frozen=True)
class Row:
    """Settings of one row.

    ``args`` are arguments of the task. ``trace`` is a history of machines that is replayed
    ``faster`` times as fast as recorded; ``spread`` is the variation of training times.
    """

    name: str
    group: str
    about: str
    workers: int = 4
    epochs: int = 10
    push_every: int | str = 1
    update: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    optimizer_state: str = "keep"
    trace: str | None = None
    faster: float = 1.0
    spread: float = 0.2
    seeds: tuple[int, ...] = (0,)

    def settings(self) -> dict[str, Any]:
        """Return all settings that affect the outcome, as JSON values."""
        left_out = {"working_dir", "seed"}
        spec = self.spec(0).model_dump(mode="json", exclude=left_out, exclude_defaults=True)
        machines = [self.workers, self.trace, self.faster, self.spread]
        return {"job": spec, "machines": machines}

    def spec(self, seed: int) -> JobSpec:
        return JobSpec.parse(
            {
                "name": "cifar10",
                "task": "train:Cifar10",
                "working_dir": str(HERE),
                "args": self.args,
                "epochs": self.epochs,
                "subtasks_per_epoch": 50,
                "push_every": self.push_every,
                "optimizer_state": self.optimizer_state,
                "update": self.update,
                "seed": seed,
            }
        )

    def conditions(self, seed: int) -> Conditions:
        trace = TRACES / self.trace if self.trace else None
        lives = machines(self.workers, trace, self.faster, seed)
        return Conditions(lives, SECONDS_PER_SAMPLE, self.spread, seed=seed)


def read_rows(path: Path = ROWS) -> dict[str, Row]:
    """Read all rows by name; the file starts with the ``defaults`` of their arguments."""
    content = yaml.safe_load(path.read_text())
    args = content.pop("defaults")
    rows = {}
    for group, members in content.items():
        for name, fields in members.items():
            more = {**fields, "args": {**args, **fields.get("args", {})}}
            seeds = tuple(more.pop("seeds", (0,)))
            rows[name] = Row(name, group, seeds=seeds, **more)
    return rows


def run(row: Row, seed: int, *, on_point: Callable[[Point], None]) -> dict[str, Any]:
    """Train to the end, and return the outcome as plain data."""
    torch.set_num_threads(1)
    spec = row.spec(seed)
    started = time.monotonic()
    outcome = Simulation(
        spec,
        lambda: load_task(spec.task, spec.args, Path(spec.working_dir)),
        row.conditions(seed),
        on_point=on_point,
    ).run()
    took = round(time.monotonic() - started)
    return {"seed": seed, "took_seconds": took, "torch": torch.__version__, **outcome.to_dict()}
