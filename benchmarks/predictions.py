"""Predictions of plan and simulation against what then happens, on local machines.

    python benchmarks/predictions.py [--only rounds sma] [--seconds 60]

Five jobs of different rules train a paced task, each first for a short time, so that its speed is
known. Then ``vcasgd plan`` predicts it on machines that stay, and ``vcasgd simulate`` on those of a
recorded history, and it trains on both. Writes ``benchmarks/results/predictions.md``.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
from markdown import table
from vcasgd.chaos.faults import LimitedCapacity
from vcasgd.chaos.scenario import Counts
from vcasgd.client import Client
from vcasgd.fleet.presence import Life, always, lives, read_counts
from vcasgd.fleet.providers.local.provider import LocalPool, LocalProvider
from vcasgd.schemas.jobs import JobView
from vcasgd.session.script import load
from vcasgd.settings import Settings
from vcasgd.simulation.job import Conditions, Simulation
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState, running

HERE = Path(__file__).resolve().parent
TRACE = HERE / "cifar10" / "traces" / "aws-v100-4node-us-east-2a-2023-08-03.json"
#: First interval of the history that is replayed, and seconds for each interval.
SKIP, GAP = 1755, 3.0
MACHINES, SAMPLES, IMAGE_SECONDS, PRICE = 3, 1437, 0.005, 1.0
#: Seconds until the machines of the job before are gone.
SETTLE_SECONDS = 8.0
#: Part of a job's epochs that measures its speed.
SHORT = 4
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
    accuracy: float

    def beside(self, other: Figures) -> list[str]:
        """Return the cells of a prediction beside what happened, ``other``."""
        return [
            _change(self.seconds, other.seconds, ".0f"),
            _change(self.usd, other.usd, ".4f"),
            f"{self.lost} → {other.lost}",
            f"{self.accuracy:.1%} → {other.accuracy:.1%}",
        ]


def _change(before: float, after: float, form: str) -> str:
    return f"{before:{form}} → {after:{form}} ({after / before - 1:+.0%})"


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

    def measure(self) -> float:
        """Train for a short time; return the seconds until a machine had booted."""
        short = self.spec.model_copy(update={"epochs": max(1, self._epochs // SHORT)})
        job = self._client.submit_directory(short)
        view = self._client.job(job.id).wait()
        return self._client.job(view.id).cost().wasted.booting.seconds / MACHINES

    def predicted(self, boot: float, existing: list[Life]) -> Figures:
        """Return the prediction of the plan and, for the machines' lives, of the simulation."""
        plan = self._client.plan(self.spec)
        rate = next(row.samples_per_second for row in plan.offers if row.machines)
        assert rate is not None
        assert plan.hours is not None
        assert plan.cost_usd is not None
        trained = [
            Life(one.start + boot, one.stop) for one in existing if one.stop > one.start + boot
        ]
        conditions = Conditions(trained, 1 / rate, spread=0.0)
        folder = Path(self.spec.working_dir)
        args = {**self.spec.args, "image_seconds": 0.0}
        run = Simulation(self.spec, lambda: load(self.spec.task, args, folder), conditions).run()
        accuracy = run.points[-1].metrics["accuracy"]
        if all(one.stop == float("inf") for one in existing):
            return Figures(3600 * plan.hours, plan.cost_usd, 0, accuracy)
        used = sum(
            min(one.stop, run.seconds) - one.start for one in existing if one.start < run.seconds
        )
        return Figures(run.seconds, used * PRICE / 3600, run.machines_lost, accuracy)

    def real(self, counts: list[int] | None) -> Figures:
        """Train the job, on machines that stay or on those of a history."""
        fault = None
        time.sleep(SETTLE_SECONDS)
        if counts is not None:
            fault = LimitedCapacity(self._provider, Counts(tuple(counts), GAP))
            fault.begin()
        try:
            job = self._client.submit_directory(self.spec)
            view = self._client.job(job.id).wait()
        finally:
            if fault is not None:
                fault.end()
        return self._figures(view)

    def _figures(self, view: JobView) -> Figures:
        if view.state != "succeeded" or view.ended_at is None:
            raise SystemExit(f"{view.id} {view.state}: {view.reason}")
        accuracy = view.evaluations[-1].metrics["accuracy"] or 0.0
        spent = self._client.job(view.id).cost().spent_usd
        lost = view.evictions + view.kills
        return Figures(view.ended_at - view.created_at, spent, lost, accuracy)


PAGE = """\
# Predictions

    {command}

Five jobs with {machines} local machines at {price:g} USD an hour, of a task whose images take
{pace:g} s each. A quarter of each job measured its speed. The cells show the prediction → what
happened (difference). *stay*: `vcasgd plan`, which excludes the time to boot and to start.
*history*: `vcasgd simulate` with the speed of the plan on {trace}, 300 s of which pass in
{gap:g} s.

{conditions}

{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "predictions.md")
    given = parser.parse_args()
    conditions = machine.describe()
    counts = read_counts(TRACE, MACHINES)[0][SKIP:]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        settings = Settings(
            home=home, api_port=0, local_capacity=MACHINES, local_price_per_hour=PRICE,
            local_on_demand_price_per_hour=3 * PRICE, idle_seconds=2.0,
        )  # fmt: skip
        provider = LocalProvider(home, settings.cluster, LocalPool("local", MACHINES))
        with running(settings):
            token = StackHome(home).token() or ""
            with Client(StackState.read(home).api_url, token) as client:
                for kind in given.only:
                    runs = Runs(client, provider, kind, given.seconds)
                    boot = runs.measure()
                    for name, history in (("stay", None), ("history", counts)):
                        existing = always(MACHINES) if history is None else lives(history, GAP, 0)
                        cells = runs.predicted(boot, existing).beside(runs.real(history))
                        rows.append([kind, name, *cells])
                        print(*rows[-1], flush=True)
    heads = ("job", "machines", "seconds", "USD", "machines lost", "accuracy")
    page = PAGE.format(
        command=f"python benchmarks/predictions.py {shlex.join(sys.argv[1:])}".strip(),
        machines=MACHINES, price=PRICE, pace=IMAGE_SECONDS, trace=f"`{TRACE.name}`", gap=GAP,
        conditions=table(("", ""), conditions.items()), rows=table(heads, rows),
    )  # fmt: skip
    given.out.write_text(page)


if __name__ == "__main__":
    main()
