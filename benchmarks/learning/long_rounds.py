"""Policies for rounds whose exchange takes many local steps: ``python long_rounds.py --help``.

A simulation on flat vectors, for what the product doesn't do yet: K workers share each batch of a
job, all at one speed, and an exchange takes E local steps. Time is counted in local steps. Tasks,
the order of the samples, and the corrected moments are the product's own
(:mod:`vcasgd.learning.local_moments`). Each finished run is one line of
``results/long-rounds.jsonl``, so a queue of runs can be interrupted and resumed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from columns import DATA, job_fields, make_task
from copies import Copies, Fragment, Run
from order import order
from plain import load
from rows import metric

from vcasgd.task.task import Task

RESULTS = Path(__file__).resolve().parent.parent / "results" / "long-rounds.jsonl"
#: Shares of a job after which the mean of the copies is evaluated.
EVALUATIONS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)
#: Bytes of an encoded number as a part of four; ``int2`` as it is when packed.
PARTS = {"float32": 1.0, "bfloat16": 0.5, "int8": 0.254, "int2": 0.065}


class Point(NamedTuple):
    """Evaluation of the mean of the copies at a progress in [0, 1]; ``clock`` is in local steps.

    ``metric`` is the accuracy, or the loss of a task that has none.
    """

    progress: float
    clock: float
    metric: float
    loss: float


@dataclass
class Outcome:
    """Result of a run; times are in local steps."""

    points: list[Point] = field(default_factory=list)
    clock: float = 0.0
    rounds: int = 0
    waited: float = 0.0
    diverged: bool = False


def batches(task: Task, run: Run, count: int) -> Iterator[list[Any]]:
    """Yield each step's batches, one for each worker, over as many epochs as it takes."""
    data = task.dataset("train")
    samples = len(data)  # type: ignore[arg-type]
    size, made, epoch = task.batch_size * run.batch, 0, 0
    while made < count:
        epoch += 1
        indices = order(samples, run.seed, epoch)
        for start in range(0, samples - size + 1, size):
            own = size // run.workers
            cuts = range(start, start + size, own)
            yield [load(task, data, indices[cut : cut + own]) for cut in cuts]
            made += 1
            if made == count:
                return


def job_steps(task: Task, run: Run) -> int:
    """Return the local steps of a job."""
    samples = len(task.dataset("train"))  # type: ignore[arg-type]
    per_epoch = samples // (task.batch_size * run.batch)
    return round(per_epoch * job_fields(run.task)["epochs"] * run.length)


def execute(run: Run) -> Outcome:
    fields = job_fields(run.task)
    fields["args"] = {**fields["args"], **dict(run.args)}
    task = make_task(fields, DATA)
    copies, outcome = Copies(task, run), Outcome()
    total, size = job_steps(task, run), copies.rows.shape[1]
    cuts = [size * nth // run.fragments for nth in range(run.fragments + 1)]
    parts = [Fragment(copies, run, slice(*cuts[nth : nth + 2])) for nth in range(run.fragments)]
    delay = run.exchange / run.fragments
    marks = [math.ceil(total * share) for share in EVALUATIONS]
    for nth, part in enumerate(parts):
        part.next = run.round_steps(0.0) * (nth + 1) / run.fragments
    loss = 0.0
    for step, batch in enumerate(batches(task, run, total), start=1):
        loss = copies.step(batch, (step - 1) / total)
        outcome.clock += 1
        if not math.isfinite(loss):
            outcome.diverged = True
            return outcome
        progress = step / total
        late = run.overlap and progress >= run.wait_until
        for part in parts:
            if part.sent is not None and step >= part.due:
                part.merge(late=True)
            part.trickle()
            if run.workers > 1 and step >= part.next and part.sent is None:
                part.send()
                outcome.rounds += 1
                part.next = step + run.round_steps(progress)
                part.due = step + delay
                if not late or not delay:
                    part.merge(late=False)
                    outcome.waited += delay
                    outcome.clock += delay
        if step in marks:
            metrics = copies.evaluate()
            value = round(metrics.get("accuracy", metrics["loss"]), 5)
            loss_there = round(metrics["loss"], 5)
            outcome.points.append(Point(progress, outcome.clock, value, loss_there))
    outcome.rounds = round(outcome.rounds / run.fragments)
    return outcome


# -- results -----------------------------------------------------------------------------------


def finished() -> dict[str, dict[str, Any]]:
    """Return the finished runs, by name."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def run_queue(queue: Path) -> None:
    """Make the runs of a queue that aren't finished; it may change meanwhile."""
    while True:
        done = finished()
        lines = [line for line in queue.read_text().splitlines() if line.strip()]
        left = [run for run in (Run(**json.loads(line)) for line in lines) if run.name not in done]
        if not left:
            return
        started = time.process_time()
        row = {"name": left[0].name, **asdict(execute(left[0]))}
        row["processor_seconds"] = round(time.process_time() - started, 1)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def table() -> Iterator[str]:
    """Yield a Markdown table of all finished runs, in which seeds of a policy share a line."""
    rows = [(Run(**json.loads(name)), row) for name, row in finished().items()]
    plain = {
        (run.task, str(run.args), run.length, run.seed): Point(*row["points"][-1])
        for run, row in rows
        if run == Run(run.task, run.seed, 1, args=run.args, length=run.length)
    }
    lines: dict[str, list[tuple[Run, dict[str, Any]]]] = {}
    for run, row in rows:
        lines.setdefault(replace(run, seed=0).name, []).append((run, row))
    yield "| policy | rounds | computing | bytes | result | against plain | to plain loss + 1 % |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name in sorted(lines):
        cells: list[tuple[str, ...]] = []
        for run, row in sorted(lines[name], key=lambda pair: pair[0].seed):
            # A shorter job is compared with the whole one, at equal time.
            key = (run.task, str(run.args), max(run.length, 1.0), run.seed)
            cells.append(_result(run, [Point(*point) for point in row["points"]], plain[key]))
        run, row = lines[name][0]
        steps = row["clock"] - row["waited"]
        part = row["rounds"] / steps * PARTS[run.codec] * (2 if run.first_moments else 1)
        size = f"1/{1 / part:.0f}" if part else ""
        fields = json.loads(name).items()
        text = ", ".join(f"{key} {value}" for key, value in fields if key != "seed")
        results = " | ".join(", ".join(column) for column in zip(*cells, strict=True))
        share = f"{steps / row['clock']:.0%}"
        yield f"| {text} | {row['rounds']:,} | {share} | {size} | {results} |"


def _result(run: Run, points: list[Point], plain: Point) -> tuple[str, ...]:
    """Return how a run ended, how much worse than plain training, and the clock when its loss
    first was at most 1 % worse."""
    if not points or points[-1].progress < 1:
        return "diverged", "", "never"
    end = points[-1]
    reached = [point.clock for point in points if point.loss <= 1.01 * plain.loss]
    when = f"{reached[0]:,.0f}" if reached else "never"
    if metric(run.task) == "accuracy":
        worse = f"{100 * (end.metric - plain.metric):+.2f} points"
        return f"{end.metric:.2%}", worse, when
    return f"{end.loss:.4f}", f"{end.loss / plain.loss - 1:+.1%}", when


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("queue", type=Path, nargs="?",
                        help="a JSON object of fields of a run in each line; "
                        "without it, print all results")  # fmt: skip
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.queue is None:
        print("\n".join(table()))
    else:
        run_queue(chosen.queue)


if __name__ == "__main__":
    main()
