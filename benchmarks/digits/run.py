"""Simulate the job of examples/digits with different fields, over several seeds.

    python benchmarks/digits/run.py "{optimizer_state: reset}" "{optimizer_state: keep}"

Each argument is a row: fields of the job, as YAML. Learners, encodings and blending are real, three
workers are simulated, and the same seed gives the same result.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from vcasgd.fleet.histories import always
from vcasgd.simulation.job import Conditions, Outcome, Simulation
from vcasgd.spec.job import JobSpec
from vcasgd.task.task import load_task

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits" / "job.yaml"


def spec_of(row: str, epochs: int, seed: int) -> JobSpec:
    """Return the example's job with the fields of a row."""
    fields: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    fields |= {"working_dir": str(EXAMPLE.parent), "epochs": epochs, "seed": seed}
    fields |= yaml.safe_load(row)
    return JobSpec.parse(fields)


def run(row: str, epochs: int, seed: int, workers: int) -> Outcome:
    spec = spec_of(row, epochs, seed)
    make_task = partial(load_task, spec.task, spec.args, EXAMPLE.parent)
    conditions = Conditions(always(workers), seed=seed)
    return Simulation(spec, make_task, conditions, evaluate_every=epochs).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+", metavar="{FIELD: VALUE, …}")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| row | accuracy | each seed | loss | KB a push |\n| --- | --- | --- | --- | --- |")
    for row in options.rows:
        outcomes = [
            run(row, options.epochs, seed, options.workers) for seed in range(options.seeds)
        ]
        ends = [outcome.points[-1].metrics for outcome in outcomes]
        seeds = ", ".join(f"{end['accuracy']:.3f}" for end in ends)
        size = outcomes[0].bytes_pushed / outcomes[0].updates / 1e3
        mean = {name: statistics.mean(end[name] for end in ends) for name in ("accuracy", "loss")}
        print(
            f"| `{row}` | {mean['accuracy']:.4f} | {seeds} | {mean['loss']:.4f} | {size:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
