"""Find settings that diverge: ``python benchmarks/learning/stability.py``.

Runs every update rule with 1 to 8 workers and push intervals of 1 to 64 local steps on two small
tasks, with the rule's default settings. The default rule is run with every encoding, the others
with float32, and at the corners of the grid with every encoding. A result is the final loss divided
by that of one plain process. It can be interrupted at any time; combinations with a current row in
``results/stability.jsonl`` are skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from columns import DATA, HERE, make_task
from plain import train
from rows import Row, code, package_code

from vcasgd.fleet.histories import always
from vcasgd.simulation.job import Conditions, Simulation
from vcasgd.spec.job import JobSpec
from vcasgd.spec.update import LIMIT, RULES

RESULTS = HERE.parent / "results" / "stability.jsonl"
EXAMPLES = HERE.parents[1] / "examples"
#: About 500 local steps, and three subtasks or more for each worker.
JOBS: dict[str, dict[str, Any]] = {
    "svm": {
        "name": "svm",
        "task": "train:Svm",
        "working_dir": str(EXAMPLES / "svm"),
        "args": {},
        "epochs": 6,
        "subtasks_per_epoch": 4,
    },
    "text": {
        "name": "text",
        "task": "train:Text",
        "working_dir": str(EXAMPLES / "text"),
        "args": {"data": "topics.txt", "context": 32, "stride": 96, "width": 32, "layers": 1},
        "epochs": 2,
        "subtasks_per_epoch": 12,
    },
}
WORKERS = (1, 2, 4, 8)
INTERVALS = (1, 4, 16, 64)
#: Numbers of workers with intervals at which every rule is run with every encoding.
CORNERS = set(itertools.product((WORKERS[0], WORKERS[-1]), (INTERVALS[0], INTERVALS[-1])))


@dataclass(frozen=True)
class Combination:
    """Settings of one run; ``rule`` is ``plain`` for the process to compare with."""

    task: str
    rule: str
    codec: str = ""
    workers: int = 1
    push_every: int = 1

    def spec(self) -> JobSpec:
        update = {"rule": self.rule, "codec": self.codec}
        return JobSpec.parse(
            {
                **JOBS[self.task],
                "push_every": self.push_every,
                "update": update,
                "workers": {"min": self.workers, "max": self.workers},
            }
        )

    def digest(self) -> str:
        """Return a digest of everything that decides the outcome."""
        job = JOBS[self.task]
        parts = [code(Path(job["working_dir"]) / "train.py"), json.dumps(asdict(self))]
        parts += [json.dumps({**job, "working_dir": ""}), code(HERE / "plain.py")]
        if self.rule != "plain":
            parts += [self.spec().model_dump_json(exclude={"working_dir"}), package_code()]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def combinations() -> list[Combination]:
    """Return all combinations in the order of their importance, those of a plain process first."""
    plain = [Combination(task, "plain") for task in JOBS]
    float32_corners, corners, inner = [], [], []
    for rule, task in itertools.product(RULES, JOBS):
        codecs = get_args(RULES[rule].model_fields["codec"].annotation)
        for codec, workers, interval in itertools.product(codecs, WORKERS, INTERVALS):
            each = Combination(task, str(rule), codec, workers, interval)
            if (workers, interval) in CORNERS:
                (float32_corners if codec == "float32" else corners).append(each)
            elif codec == "float32" or rule == "rounds":
                inner.append(each)
    return plain + float32_corners + corners + inner


def execute(combination: Combination, data: Path) -> dict[str, Any]:
    """Train to the end, and return the outcome without its curve."""
    torch.set_num_threads(1)
    started = time.monotonic()
    job = JOBS[combination.task]
    task = make_task(job, data)
    if combination.rule == "plain":
        outcome: dict[str, Any] = asdict(train(task, job["epochs"], seed=0))
    else:
        machines = Conditions(always(combination.workers), 1 / task.batch_size, latency=0.1)
        spec, epochs = combination.spec(), job["epochs"]
        simulation = Simulation(spec, lambda: task, machines, evaluate_every=epochs)
        outcome = simulation.run().to_dict()
    diverged = bool(outcome["divergence"])
    return {
        "loss": None if diverged else outcome["points"][-1]["metrics"]["loss"],
        "took_seconds": round(time.monotonic() - started, 2),
    }


def read(path: Path = RESULTS) -> dict[Combination, Row]:
    """Return the latest row of each combination."""
    names = Combination.__dataclass_fields__
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {Combination(**{name: row[name] for name in names}): row for row in rows}


def ratio(rows: dict[Combination, Row], combination: Combination) -> float | None:
    """Return a loss relative to one plain process; infinite if it diverged; None if unknown."""
    row, plain = rows.get(combination), rows.get(Combination(combination.task, "plain"))
    if row is None or plain is None:
        return None
    return float("inf") if row["loss"] is None else float(row["loss"] / plain["loss"])


def table(rows: dict[Combination, Row]) -> Iterator[str]:
    """Yield the number of unstable combinations, and a line for each rule, encoding, and task.

    A cell has the ratios of 1, 2, 4, and 8 workers at one push interval.
    """
    ratios = {
        each: value
        for each in rows
        if each.rule != "plain" and (value := ratio(rows, each)) is not None
    }
    if not ratios:
        return
    unstable = sum(value > LIMIT for value in ratios.values())
    yield f"{unstable} of {len(ratios)} combinations end above {LIMIT} × one process (bold)."
    yield ""
    yield f"| rule | encoding | task | {' | '.join(f'every {n}' for n in INTERVALS)} |"
    yield "| --- | --- | --- |" + " --- |" * len(INTERVALS)
    lines: dict[tuple[str, str, str], dict[tuple[int, int], float]] = defaultdict(dict)
    for each, value in ratios.items():
        lines[each.rule, each.codec, each.task][each.push_every, each.workers] = value
    for (rule, codec, task), values in sorted(lines.items()):
        cells = (_cell(values.get((every, number)) for number in WORKERS) for every in INTERVALS)
        yield f"| `{rule}` | `{codec}` | `{task}` | {' | '.join(cells)} |"


def _cell(values: Iterable[float | None]) -> str:
    return ", ".join(map(_number, values))


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    text = f"{value:.2f}" if value < 100 else "∞"
    return f"**{text}**" if value > LIMIT else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", nargs="+", choices=sorted(map(str, RULES)), metavar="RULE")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    options = parser.parse_args()
    rows = read()
    todo = [
        each
        for each in combinations()
        if each.rule in (options.rules or {*map(str, RULES), "plain"}) or each.rule == "plain"
        if each not in rows or rows[each]["digest"] != each.digest()
    ]
    started = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool:
        running = {pool.submit(execute, each, DATA): each for each in todo}
        for nth, future in enumerate(as_completed(running), 1):
            each = running[future]
            if (error := future.exception()) is not None:
                print(f"{each} failed: {error!r}", flush=True)
                continue
            outcome = future.result()
            with RESULTS.open("a") as file:
                row = {**asdict(each), "digest": each.digest(), **outcome}
                file.write(json.dumps(row) + "\n")
            left = (time.monotonic() - started) / nth * (len(todo) - nth) / 60
            print(f"{each}: {outcome['loss']}; about {left:.0f} min left", flush=True)


if __name__ == "__main__":
    main()
