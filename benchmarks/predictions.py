"""Predictions of plan and simulation against what then happens, on local machines.

    python benchmarks/predictions.py [--only rounds sma] [--seconds 60]

Five jobs of different kinds train a paced task, each first for a short time, so that its speed and
the start of its machines are known. Then ``vcasgd plan`` predicts it on machines that stay, and
``vcasgd simulate`` on those of two recorded histories, and it trains on all. Writes
``benchmarks/results/predictions.md``.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import machine
from markdown import table
from vcasgd.chaos.faults import limited_capacity
from vcasgd.chaos.scenario import Counts
from vcasgd.client import Client
from vcasgd.fleet.histories import lives, read_counts
from vcasgd.fleet.pools import LocalPoolSpec
from vcasgd.fleet.providers.local.provider import LocalProvider
from vcasgd.schemas.jobs import JobView
from vcasgd.session.script import load
from vcasgd.settings import Settings
from vcasgd.simulation.job import Conditions, Simulation
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState, running

HERE = Path(__file__).resolve().parent
TRACES = HERE / "cifar10" / "traces"
#: Histories by name, with the first interval that is replayed; seconds for each interval.
HISTORIES = {
    "two of three lost": ("aws-v100-4node-us-east-2a-2023-08-03", 845),
    "all lost": ("aws-v100-16node-us-west-2a-2023-08-27", 2551),
}
GAP = 4.0
MACHINES, SAMPLES, IMAGE_SECONDS, PRICE = 3, 1437, 0.02, 1.0
#: Seconds until the machines of a job are gone, and all of their cost is booked.
SETTLE_SECONDS = 8.0
#: Epochs of the job that measures the speed.
SHORT = 2
KINDS: dict[str, dict[str, Any]] = {
    "rounds": {},
    "rounds, whole batches": {"batch": "worker"},
    "vc-asgd": {"update": {"rule": "vc-asgd"}},
    "sma": {"update": {"rule": "sma"}},
    "async-local-sgd, int8": {"update": {"rule": "async-local-sgd", "codec": "int8"}},
}


@dataclass(frozen=True)
class Figures:
    """Seconds from the submission to the end, USD, machines lost, and the accuracy at the end."""

    seconds: float
    usd: float
    lost: int
    accuracy: float | None

    def beside(self, other: Figures) -> list[str]:
        """Return the cells of a prediction beside what happened, ``other``."""
        return [
            _change(self.seconds, other.seconds, ".0f"),
            _change(self.usd, other.usd, ".4f"),
            f"{self.lost} → {other.lost}",
            " → ".join(f"{each:.1%}" for each in (self.accuracy, other.accuracy) if each),
        ]

    def off(self, other: Figures) -> float:
        """Return the largest difference of duration and cost to what happened."""
        return max(abs(self.seconds / other.seconds - 1), abs(self.usd / other.usd - 1))


def _change(before: float, after: float, form: str) -> str:
    return f"{before:{form}} → {after:{form}} ({before / after - 1:+.0%})"


class Runs:
    """Runs of one kind of job on a stack."""

    def __init__(self, client: Client, provider: LocalProvider, kind: str, seconds: float) -> None:
        self._client, self._provider = client, provider
        number = round(seconds * MACHINES / (SAMPLES * IMAGE_SECONDS))
        self._epochs = max(SHORT, number)
        fields = {
            "name": kind.replace(",", "").replace(" ", "-"),
            "task": "paced:PacedDigits",
            "working_dir": str(HERE.parent / "examples" / "digits"),
            "args": {"image_seconds": IMAGE_SECONDS},
            "epochs": self._epochs,
            "workers": {"min": 1, "max": MACHINES},
            **KINDS[kind],
        }
        self.spec = JobSpec.parse(fields)

    def measure(self) -> None:
        """Train for a short time, which measures the speed for later plans."""
        short = self.spec.model_copy(update={"epochs": SHORT})
        job = self._client.submit_directory(short)
        self._figures(self._client.job(job.id).wait())

    def predicted(self, counts: Sequence[int] | None) -> Figures:
        """Return the prediction of the plan, or that of the simulation for a history."""
        plan = self._client.plan(self.spec)
        rate = next(row.samples_per_second for row in plan.offers if row.machines)
        assert rate is not None, "it was measured"
        assert plan.hours is not None
        assert plan.cost_usd is not None
        assert plan.start_seconds is not None
        if counts is None:
            return Figures(3600 * plan.hours, plan.cost_usd, 0, None)
        # A local pool says when it has room, so that no purchase is refused and tried again later.
        existing = lives(counts, GAP, 0)
        conditions = Conditions(existing, 1 / rate, spread=0.0, boot_seconds=plan.start_seconds)
        folder = Path(self.spec.working_dir)
        args = {**self.spec.args, "image_seconds": 0.0}
        run = Simulation(self.spec, lambda: load(self.spec.task, args, folder), conditions).run()
        accuracy = run.points[-1].metrics["accuracy"]
        return Figures(run.seconds, run.machine_seconds * PRICE / 3600, run.machines_lost, accuracy)

    def real(self, counts: Sequence[int] | None) -> Figures:
        """Train the job, on machines that stay or on those of a history."""
        fault: AbstractContextManager[None] = nullcontext()
        if counts is not None:
            fault = limited_capacity(self._provider, Counts(tuple(counts[:60]), GAP))
        with fault:
            job = self._client.submit_directory(self.spec)
            view = self._client.job(job.id).wait()
        return self._figures(view)

    def _figures(self, view: JobView) -> Figures:
        if view.state != "succeeded" or view.ended_at is None:
            raise SystemExit(f"{view.id} {view.state}: {view.reason}")
        time.sleep(SETTLE_SECONDS)
        accuracy = view.evaluations[-1].metrics["accuracy"] or 0.0
        spent = self._client.job(view.id).cost().spent_usd
        lost = view.evictions + view.kills
        return Figures(view.ended_at - view.created_at, spent, lost, accuracy)


PAGE = """\
# Predictions

    {command}

Jobs with {machines} local machines at {price:g} USD an hour, of a task whose images take {pace:g} s
each. A job of {short} epochs measured the speed, and the time from the launch of a
machine to its first samples. The cells show the prediction → what happened (difference of the
prediction). *stay*: `vcasgd plan`. The others: `vcasgd simulate` with the speed and the start of
the plan, on
[recorded histories](../cifar10/traces/README.md) of which {gap:g} s pass as 300 s: {histories}.

{conditions}

{rows}

Duration and cost are within 15% in **{good} of {total}** rows, and at most {worst:.0%} off.

Not predicted: the last evaluation and the last checkpoint, the wait of a round for a machine that
was lost, how fast a busy computer starts machines at once, that a speed measured with three
machines is another one with fewer, and what the controller tunes while a job trains: the accuracy
of asynchronous rules with so few updates depends on it, and on each update's staleness.
"""


def page(conditions: dict[str, str], rows: list[list[str]], off: list[float]) -> str:
    """Return the report of the rows so far."""
    heads = ("job", "machines", "seconds", "USD", "machines lost", "accuracy")
    return PAGE.format(
        command=f"python benchmarks/predictions.py {shlex.join(sys.argv[1:])}".strip(),
        machines=MACHINES, price=PRICE, short=SHORT, pace=IMAGE_SECONDS, gap=GAP,
        histories=" and ".join(f"*{n}* `{t}` from {k}" for n, (t, k) in HISTORIES.items()),
        conditions=table(("", ""), conditions.items()), rows=table(heads, rows),
        good=sum(each <= 0.15 for each in off), total=len(off), worst=max(off),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "predictions.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    conditions = machine.describe()
    histories: dict[str, list[int] | None] = {"stay": None}
    for name, (trace, skip) in HISTORIES.items():
        histories[name] = read_counts(TRACES / f"{trace}.json", MACHINES)[0][skip:]
    rows, off = [], []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        settings = Settings(
            home=home, api_port=0, local_capacity=MACHINES, local_price_per_hour=PRICE,
            local_on_demand_price_per_hour=3 * PRICE, idle_seconds=2.0,
        )  # fmt: skip
        provider = LocalProvider(
            home,
            settings.cluster,
            LocalPoolSpec(name="local", provider="local", max_machines=MACHINES),
        )
        with running(settings):
            token = StackHome(home).token() or ""
            with Client(StackState.read(home).api_url, token) as client:
                for kind in given.only:
                    runs = Runs(client, provider, kind, given.seconds)
                    runs.measure()
                    for name, history in histories.items():
                        predicted, happened = runs.predicted(history), runs.real(history)
                        rows.append([kind, name, *predicted.beside(happened)])
                        off.append(predicted.off(happened))
                        print(*rows[-1], flush=True)
                        given.out.write_text(page(conditions, rows, off))


if __name__ == "__main__":
    main()
