"""The rule ``vc-asgd`` beside ``rounds`` under the same recorded history of spot machines.

    .venv/bin/python benchmarks/vc_asgd.py            # five minutes on one core

Trains ``examples/digits`` in this process on simulated machines, and prints a Markdown table: for
each rule the accuracy of each seed, the simulated time, machine hours, and what they cost.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from vcasgd.fleet.histories import machines
from vcasgd.session.script import load
from vcasgd.simulation.job import Conditions, Outcome, Simulation
from vcasgd.spec.job import JobSpec, load_job_mapping

ROOT = Path(__file__).parents[1]
JOB = ROOT / "examples/digits/job.yaml"
TRACE = ROOT / "benchmarks/cifar10/traces/aws-v100-4node-us-east-2a-2023-08-03.json"
WORKERS, EPOCHS = 4, 10
#: Seconds of an average machine for a sample, so that a job loses about a dozen machines.
SECONDS_PER_SAMPLE, FASTER = 0.02, 3000.0
#: Fastest machine by the slowest one.
SPEED_RANGE = 2.0
#: USD for an hour of a spot machine: an assumption, so that columns can be compared.
PRICE = 0.10
_FIXED = {"rule": "vc-asgd", "alpha": 0.75}
RULES: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("`rounds`", {"rule": "rounds"}),
    ("`vc-asgd`, α = e/(e+1)", {"rule": "vc-asgd"}),
    ("`vc-asgd`, α = 0.75", _FIXED),
    ("the same, `polynomial`", {**_FIXED, "staleness": {"function": "polynomial"}}),
    ("the same, `hinge`", {**_FIXED, "staleness": {"function": "hinge"}}),
)


def simulate(update: Mapping[str, Any], seed: int) -> tuple[Outcome, float]:
    """Train once, and return the outcome and the machine hours."""
    changes = {"epochs": EPOCHS, "seed": seed, "push_every": 4, "update": update}
    workers = {"min": 1, "max": WORKERS}
    spec = JobSpec.model_validate({**load_job_mapping(JOB), **changes, "workers": workers})
    spec = spec.located(JOB.parent)
    lives = machines(WORKERS, TRACE, FASTER, seed)
    conditions = Conditions(lives, SECONDS_PER_SAMPLE, seed=seed, speed_range=SPEED_RANGE)
    outcome = Simulation(
        spec, lambda: load(spec.task, spec.args, Path(spec.working_dir)), conditions
    ).run()
    lived = [max(0.0, min(life.stop, outcome.seconds) - life.start) for life in lives]
    return outcome, sum(lived) / 3600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    print("| rule | accuracy, each seed | mean | time | machine hours | cost | lost | staleness |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, update in RULES:
        runs = [simulate(update, seed) for seed in seeds]
        accuracies = [run.points[-1].metrics["accuracy"] for run, _ in runs]
        hours = mean(hours for _, hours in runs)
        cells = [
            name,
            ", ".join(f"{value:.1%}" for value in accuracies),
            f"{mean(accuracies):.1%}",
            f"{mean(run.seconds for run, _ in runs):.0f} s",
            f"{hours:.3f}",
            f"${hours * PRICE:.4f}",
            f"{mean(run.machines_lost for run, _ in runs):.0f}",
            f"{mean(run.staleness_mean for run, _ in runs):.1f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
