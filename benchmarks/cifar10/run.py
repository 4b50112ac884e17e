"""Run rows of the experiment: ``python benchmarks/cifar10/run.py ROW …``.

``rows.yaml`` contains the rows. Each outcome is one line of ``results/cifar10.jsonl``; rows and
seeds with an outcome are skipped. ``report.py`` turns outcomes into tables and plots.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from experiment import HERE, Row, read_rows, run

from vcasgd.simulation.job import Point

RESULTS = HERE.parent / "results" / "cifar10.jsonl"


def main() -> None:
    rows = read_rows()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"one of {', '.join(rows)}")
    parser.add_argument("--group", nargs="*", default=[], help="run all rows of these groups")
    parser.add_argument("--seeds", type=int, nargs="+", help="replace the seeds of the rows")
    options = parser.parse_args()
    unknown = set(options.rows) - rows.keys()
    if unknown:
        parser.error(f"there is no row {', '.join(sorted(unknown))}")
    chosen = [rows[name] for name in options.rows]
    chosen += [row for row in rows.values() if row.group in options.group]
    for row in chosen:
        for seed in options.seeds or row.seeds:
            _run(row, seed)


def _run(row: Row, seed: int) -> None:
    if any(outcome["seed"] == seed for outcome in read_runs(row)):
        print(f"{row.name}, seed {seed}: skipped, it has an outcome", flush=True)
        return
    print(f"{row.name}, seed {seed}", flush=True)
    started = time.monotonic()
    outcome = run(row, seed, on_point=lambda point: _print(point, started))
    with RESULTS.open("a") as file:
        file.write(json.dumps({"row": row.name, "settings": row.settings(), **outcome}) + "\n")


def read_runs(row: Row) -> list[dict[str, Any]]:
    """Return the outcomes of a row with its current settings."""
    runs = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    settings = row.settings()
    return [run for run in runs if run["row"] == row.name and run["settings"] == settings]


def _print(point: Point, started: float) -> None:
    accuracy = point.metrics["accuracy"]
    print(
        f"  epoch {point.epoch:>2}  {accuracy:.2%}  {time.monotonic() - started:.0f} s", flush=True
    )


if __name__ == "__main__":
    main()
