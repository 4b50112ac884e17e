"""Accuracy, time, and cost of a job on recorded histories of spot machines, against on demand.

    python benchmarks/savings.py [--seeds 0 1 2] [--hours 8] [--traces FOLDER]

Simulates ``examples/digits`` with the product's learners and rules: on machines that are never
lost, and on those of each history, from a random time on. Prices are those of ``deadlines.py``.
Writes ``benchmarks/results/savings.md``.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from markdown import table
from vcasgd.fleet.presence import Life, always, lives, read_counts
from vcasgd.session.script import load
from vcasgd.simulation.job import Conditions, Simulation
from vcasgd.spec.job import JobSpec

HERE = Path(__file__).resolve().parent
JOB = HERE.parent / "examples" / "digits" / "job.yaml"
#: Samples of an epoch of the job, machines, and seconds from a machine's purchase until it trains.
SAMPLES, MACHINES, DELAY = 1437, 4, 300.0
#: Prices of a spot machine, where one on demand costs 1: tables of Google Cloud in the package.
PRICES = (0.4, 0.21)
RULES = ("rounds", "vc-asgd")


@dataclass(frozen=True)
class Result:
    """Accuracy at the end, hours, machine hours, machines lost, and samples trained again."""

    accuracy: float
    hours: float
    machine_hours: float
    lost: int
    again: float


def simulated(rule: str, existing: Sequence[Life], hours: float, seed: int) -> Result:
    """Run the job on machines that exist in these times."""
    spec = JobSpec.load(JOB).model_copy(update={"seed": seed})
    spec = JobSpec.parse({**spec.model_dump(mode="json"), "update": {"rule": rule}})
    total = SAMPLES * (spec.epochs or 0)
    trained = [
        Life(life.start + DELAY, life.stop) for life in existing if life.stop > life.start + DELAY
    ]
    conditions = Conditions(trained, hours * 3600 * MACHINES / total, seed=seed)
    folder = Path(spec.working_dir)
    every = spec.epochs or 1
    run = Simulation(
        spec, lambda: load(spec.task, spec.args, folder), conditions, evaluate_every=every
    ).run()
    used = sum(
        min(one.stop, run.seconds) - one.start for one in existing if one.start < run.seconds
    )
    accuracy = run.points[-1].metrics["accuracy"] if run.points else 0.0
    return Result(
        accuracy, run.seconds / 3600, used / 3600, run.machines_lost, run.samples_lost / total
    )


def from_history(file: Path, seed: int) -> list[Life]:
    """Return the machines of a history from a random time in its first half on."""
    counts, gap = read_counts(file, MACHINES)
    start = random.Random(f"{seed}/{file.stem}").randrange(max(1, len(counts) // 2))
    while not counts[start]:
        start += 1
    return lives(counts[start:], gap, seed)


def row(rule: str, where: str, results: Sequence[Result], base: float) -> list[str]:
    """Return a row of the report. ``base``: the machine hours without losses."""
    accuracy = [result.accuracy for result in results]
    spread = stdev(accuracy) if len(accuracy) > 1 else 0.0
    hours = fmean(result.machine_hours for result in results)
    saved = [f"{1 - price * hours / base:.0%}" for price in PRICES] if where else ["", ""]
    return [
        rule,
        where or "never lost",
        f"{fmean(accuracy):.2%} ± {spread:.2%}",
        f"{fmean(result.hours for result in results):.1f}",
        f"{hours:.1f}",
        f"{fmean(result.lost for result in results):.1f}",
        f"{fmean(result.again for result in results):.2%}",
        *saved,
    ]


PAGE = """\\
# Savings on recorded histories

    {command}

`examples/digits` with {machines} machines, simulated with the product's learners and rules, as if
it trained for {hours:g} hours on machines that are never lost. Seeds {seeds}, each with another
start in the history; the accuracies are means ± standard deviations. Machines cost from their
purchase, {delay:.0f} s before they train. *Saved* is against as many machines on demand, without
losses, at two prices of spot machines relative to on demand: the medians of Google Cloud's in the
package's price tables, with GPUs ({dear:g}) and without ({cheap:g}).

{rows}

What the saving depends on:

- **The price**: it is 1 − price × (1 + waste). The paper's 70% to 90% need spot prices of at most
  about 0.3 to 0.1.
- **The waste** of boots and repeated work, which grows with losses: *machine hours* over those of
  *never lost*.
- **The time**: while no spot machine is for sale, nothing trains. A
  [deadline](deadlines.md) bounds that, and costs what the machines on demand cost.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--traces", type=Path, default=HERE / "cifar10" / "traces")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "savings.md")
    given = parser.parse_args()
    rows = []
    for rule in RULES:
        quiet = [simulated(rule, always(MACHINES), given.hours, seed) for seed in given.seeds]
        base = fmean(result.machine_hours for result in quiet)
        rows.append(row(rule, "", quiet, base))
        for file in sorted(given.traces.glob("*node*.json")):
            if max(read_counts(file, MACHINES)[0]) < MACHINES:
                continue
            results = [
                simulated(rule, from_history(file, seed), given.hours, seed) for seed in given.seeds
            ]
            rows.append(row(rule, file.stem, results, base))
            print(*rows[-1], flush=True)
    heads = ["rule", "history", "accuracy", "hours", "machine hours", "machines lost"]
    heads += ["trained again", *(f"saved at {price:g}" for price in PRICES)]
    page = PAGE.format(
        command=f"python benchmarks/savings.py {shlex.join(sys.argv[1:])}".strip(),
        machines=MACHINES, hours=given.hours, seeds=", ".join(map(str, given.seeds)),
        delay=DELAY, dear=PRICES[0], cheap=PRICES[1], rows=table(heads, rows),
    )  # fmt: skip
    given.out.write_text(page)


if __name__ == "__main__":
    main()
