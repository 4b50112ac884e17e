"""The experiment, row by row: ``python benchmarks/cifar10/run.py ROW …``.

Rows are in ``rows.yaml``. Each seed's outcome is kept in ``results/cifar10/ROW.json``, and what is
there already is not run again. ``report.py`` makes tables and plots of them.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from experiment import HERE, Row, read_rows, run

from vcasgd.bench.simulation import Point

RESULTS = HERE.parent / "results" / "cifar10"


def main() -> None:
    rows = read_rows()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(rows)}")
    parser.add_argument("--group", nargs="*", default=[], help="all rows of these groups")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the row's own")
    given = parser.parse_args()
    unknown = set(given.rows) - rows.keys()
    if unknown:
        parser.error(f"there is no row {', '.join(sorted(unknown))}")
    chosen = [rows[name] for name in given.rows]
    chosen += [row for row in rows.values() if row.group in given.group]
    for row in chosen:
        for seed in given.seeds or row.seeds:
            _run(row, seed)


def _run(row: Row, seed: int) -> None:
    kept = read_runs(row)
    if any(each["seed"] == seed for each in kept):
        print(f"{row.name}, seed {seed}: is there already", flush=True)
        return
    print(f"{row.name}, seed {seed}", flush=True)
    started = time.monotonic()
    outcome = run(row, seed, on_point=lambda point: _print(point, started))
    content = {"settings": row.settings(), "runs": [*kept, outcome]}
    RESULTS.mkdir(parents=True, exist_ok=True)
    _path(row).write_text(json.dumps(content, indent=1) + "\n")


def read_runs(row: Row) -> list[dict[str, Any]]:
    """The outcomes that are kept; none where the row has other settings now."""
    try:
        content = json.loads(_path(row).read_text())
    except FileNotFoundError:
        return []
    runs: list[dict[str, Any]] = content["runs"]
    return runs if content["settings"] == row.settings() else []


def _path(row: Row) -> Path:
    return RESULTS / f"{row.name}.json"


def _print(point: Point, started: float) -> None:
    accuracy = point.metrics["accuracy"]
    print(
        f"  epoch {point.epoch:>2}  {accuracy:.2%}  {time.monotonic() - started:.0f} s", flush=True
    )


if __name__ == "__main__":
    main()
