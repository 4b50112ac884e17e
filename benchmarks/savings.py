"""Accuracy, time, and cost of a job on recorded histories of spot machines, against on demand.

    python benchmarks/savings.py [--seeds 0 1 2] [--hours 8] [--traces FOLDER]

Simulates ``examples/digits`` with the product's learners and rules: on machines that are never
lost, and on those of each history, from a random time on. Prices are those of the package's
tables. Writes ``benchmarks/results/savings.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean, median

import torch

from markdown import table
from vcasgd.fleet.histories import RETRY_SECONDS, Life, always, lives, read_counts
from vcasgd.session.script import load
from vcasgd.simulation.job import Conditions, Simulation
from vcasgd.spec.job import JobSpec

HERE = Path(__file__).resolve().parent
JOB = HERE.parent / "examples" / "digits" / "job.yaml"
#: Samples of an epoch of the job, machines, and seconds from a machine's purchase until it trains.
SAMPLES, MACHINES, DELAY = 1437, 4, 300.0
#: Hours of a history, relative to those of the job without losses.
MAX_TIMES = 20
RULES = ("rounds", "vc-asgd")
TABLES = HERE.parent / "vcasgd" / "fleet" / "data"


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
    spec = JobSpec.load(JOB)
    changes = {"seed": seed, "update": {"rule": rule}, "workers": {"min": 1, "max": MACHINES}}
    spec = JobSpec.parse({**spec.model_dump(mode="json"), **changes})
    epochs = spec.epochs or 1
    pace = hours * 3600 * MACHINES / (SAMPLES * epochs)
    conditions = Conditions(existing, pace, seed=seed, boot_seconds=DELAY)
    task = partial(load, spec.task, spec.args, Path(spec.working_dir))
    run = Simulation(spec, task, conditions, evaluate_every=epochs).run()
    again = run.samples_lost / (SAMPLES * epochs)
    accuracy = run.points[-1].metrics["accuracy"]
    return Result(
        accuracy, run.seconds / 3600, run.machine_seconds / 3600, run.machines_lost, again
    )


def from_history(file: Path, seed: int, hours: float) -> list[Life]:
    """Return the machines of a history from a random time on, with its start after its end.

    Its largest number of machines counts as ``MACHINES``.
    """
    counts, gap = read_counts(file, sys.maxsize)
    scaled = [round(count * MACHINES / max(counts)) for count in counts]
    start = random.Random(f"{seed}/{file.stem}").randrange(len(scaled))
    needed = math.ceil(MAX_TIMES * hours * 3600 / gap)
    repeated = list(islice(cycle(scaled), start, start + len(scaled) + needed))
    first = next(nth for nth, count in enumerate(repeated) if count)
    return lives(repeated[first:], gap, seed, RETRY_SECONDS)


def price_ratios() -> dict[str, list[float]]:
    """Return spot prices over those on demand of Google Cloud's types, without GPUs and with."""
    ratios = {}
    for kind, name in (("without GPUs", "prices-gcp"), ("with GPUs", "prices-gcp-gpus")):
        prices = json.loads((TABLES / f"{name}.json").read_text())
        ratios[kind] = [
            spot / prices["on_demand"][region][machine]
            for region, types in prices["spot"].items()
            for machine, spot in types.items()
        ]
    return ratios


def row(
    rule: str, where: str, results: Sequence[Result], base: float, prices: Sequence[float]
) -> list[str]:
    """Return a row of the report. ``base``: the machine hours without losses."""
    hours = fmean(result.machine_hours for result in results)
    saved = [f"{1 - price * hours / base:.0%}" for price in prices]
    return [
        rule,
        where or "never lost",
        ", ".join(f"{result.accuracy:.1%}" for result in results),
        f"{fmean(result.accuracy for result in results):.2%}",
        f"{fmean(result.hours for result in results):.1f}",
        f"{hours:.1f}",
        f"{fmean(result.lost for result in results):.1f}",
        f"{fmean(result.again for result in results):.2%}",
        *(saved if where else ("" for _ in saved)),
    ]


PAGE = """\
# Savings on recorded histories

    {command}

`examples/digits` with {machines} machines, simulated with the product's learners and rules, as if
it trained for {hours:g} hours on machines that are never lost. Seeds {seeds}, each with another
start in [the history](../cifar10/traces/README.md), which is scaled to {machines} machines and
repeated where it ends. Machines cost from their purchase,
{delay:.0f} s before they train. *Saved* is against as many machines on demand, without losses, at
prices of spot machines relative to on demand.

{rows}

The prices are the lowest, the median, and the highest of {types} types of Google Cloud in the
package's tables, without and with GPUs: {prices}.

{summary}

What the saving depends on:

- **The price**: the saving is 1 − price × machine hours / those without losses. 70% needs a spot
  price of at most {most:.2f} of that on demand here, 90% one of {least:.2f}.
- **The waste** of boots and repeated work, which grows with losses: at most {waste:.0%} more
  machine hours here. A boot takes {boot:.1%} of a job of {hours:g} hours; a job of an hour wastes
  more.
- **The time**: while no spot machine is for sale, nothing trains: {slowest:.1f} hours instead of
  {quick:.1f} in the slowest history. A [deadline](deadlines.md) bounds that, and costs what the
  machines on demand cost.
- **The machines of the platform**: a control plane and a store node on demand aren't counted.
"""


def page_of(
    given: argparse.Namespace,
    ratios: dict[str, list[float]],
    prices: list[float],
    rows: list[list[str]],
    spots: list[tuple[float, float, float]],
    quiets: list[Result],
) -> str:
    """Return the page. ``spots`` are machine hours over those without losses, the change of the
    accuracy, and hours, of each history."""
    heads = ["rule", "history", "accuracy, each seed", "mean", "hours", "machine hours"]
    heads += ["machines lost", "trained again", *(f"saved at {price:g}" for price in prices)]
    wastes = [ratio for ratio, _, _ in spots]
    changes = [100 * change for _, change, _ in spots]
    waste = max(wastes)
    ranges = [f"{1 - p * waste:.0%} to {1 - p * min(wastes):.0%} at {p:g}" for p in prices]
    summary = (
        f"Under these histories, the job saves {', '.join(ranges)}. Its mean accuracy changes by "
        f"{min(changes):+.2f} to {max(changes):+.2f} points."
    )
    return PAGE.format(
        command=f"python benchmarks/savings.py {shlex.join(sys.argv[1:])}".strip(),
        machines=MACHINES, hours=given.hours, seeds=", ".join(map(str, given.seeds)),
        delay=DELAY, rows=table(heads, rows), summary=summary, waste=waste - 1,
        types=sum(map(len, ratios.values())), most=0.3 / waste, least=0.1 / waste,
        prices="; ".join(
            f"{kind} {min(each):.2f}, {median(each):.2f}, {max(each):.2f}"
            for kind, each in ratios.items()
        ),
        boot=DELAY / (3600 * given.hours), slowest=max(h for _, _, h in spots),
        quick=fmean(result.hours for result in quiets),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--traces", type=Path, default=HERE / "cifar10" / "traces")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "savings.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    ratios = price_ratios()
    prices = sorted({round(form(each), 2) for each in ratios.values() for form in (min, median)})
    rows, spots, quiets = [], [], []
    for rule in RULES:
        quiet = [simulated(rule, always(MACHINES), given.hours, seed) for seed in given.seeds]
        base = fmean(result.machine_hours for result in quiet)
        quiets += quiet
        rows.append(row(rule, "", quiet, base, prices))
        for file in sorted(given.traces.glob("*.json")):
            results = [
                simulated(rule, from_history(file, seed, given.hours), given.hours, seed)
                for seed in given.seeds
            ]
            rows.append(row(rule, file.stem, results, base, prices))
            print(*rows[-1], flush=True)
            machine_hours = fmean(result.machine_hours for result in results)
            change = fmean(result.accuracy for result in results) - fmean(
                result.accuracy for result in quiet
            )
            spots.append((machine_hours / base, change, fmean(r.hours for r in results)))
    given.out.write_text(page_of(given, ratios, prices, rows, spots, quiets))


if __name__ == "__main__":
    main()
