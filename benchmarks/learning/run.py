"""Measure how well the default settings learn: ``python benchmarks/learning/run.py``.

Runs all cells of the table that have no current row in ``results/learning.jsonl``, or those of
some tasks, columns, and seeds. It can be interrupted at any time. ``report.py`` writes the tables.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean

from columns import COLUMNS, DATA, TASKS, Run, execute, seeds_of
from rows import Row, append, confirm, digest, missing, probes, read, same_outcome

_digest = cache(digest)


@dataclass(frozen=True)
class Options:
    tasks: Sequence[str]
    columns: Sequence[str]
    seeds: Sequence[int] | None
    jobs: int
    data: Path
    list: bool
    confirm: bool


def options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK",
                        help=", ".join(TASKS))  # fmt: skip
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS),
                        metavar="COLUMN", help=", ".join(COLUMNS))  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, help="default: those of the task")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    parser.add_argument("--list", action="store_true", help="list what is missing, run nothing")
    parser.add_argument("--confirm", action="store_true",
                        help="after a change that should decide nothing: repeat two runs of a "
                        "task, and keep its other results if these end as before")  # fmt: skip
    return Options(**vars(parser.parse_args()))


def main() -> None:
    chosen = options()
    if chosen.list:
        for run in _missing(chosen):
            print(run)
        return
    if chosen.confirm:
        for task in chosen.tasks:
            _confirm(task, chosen.data)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(chosen.jobs, mp_context=spawn) as pool:
        failed = _run_all(chosen, pool)
    if failed:
        raise SystemExit(f"{failed} runs failed")


def _run_all(chosen: Options, pool: ProcessPoolExecutor) -> int:
    running: dict[Future[Row], Run] = {}
    failed: list[Run] = []
    while True:
        left = [run for run in _missing(chosen) if run not in failed]
        waiting = [run for run in left if run not in running.values()]
        for run in waiting[: chosen.jobs - len(running)]:
            print(f"{_clock()}  started   {run}", flush=True)
            running[pool.submit(execute, run, chosen.data)] = run
        if not running:
            return len(failed)
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            run = running.pop(future)
            error = future.exception()
            if isinstance(error, BrokenProcessPool):
                raise SystemExit("a process was killed; run the same command again to resume")
            if error is not None:
                failed.append(run)
                print(f"{_clock()}  failed    {run}: {error!r}", flush=True)
                continue
            row = append(run, future.result())
            left.remove(run)
            print(f"{_clock()}  finished  {run}: {_summary(row)}; {_time_left(left, chosen)}",
                  flush=True)  # fmt: skip


def _confirm(task: str, data: Path) -> None:
    rows = read()
    for code, repeated in probes(task, rows).items():
        for run in repeated:
            print(f"{_clock()}  repeats   {run}", flush=True)
            if not same_outcome(rows[run], execute(run, data)):
                print(f"{_clock()}  {run} ends otherwise; results of its code stay stale")
                break
        else:
            print(f"{_clock()}  {task}: {confirm(task, code)} results confirmed", flush=True)


def _missing(chosen: Options) -> list[Run]:
    return missing(
        chosen.tasks,
        chosen.columns,
        chosen.seeds,
        read(),
        lambda run, row: row["digest"] == _digest(run),
    )


def _summary(row: Row) -> str:
    values = ", ".join(f"{name} {value:.4f}" for name, value in row["metrics"].items())
    return f"{row['divergence'] or values} in {row['took_seconds']:.0f} s"


def _time_left(left: Sequence[Run], chosen: Options) -> str:
    """Return an estimate from earlier runs of the same task, most similar ones first."""
    rows = read()
    known = [_seconds(run, rows) for run in _and_later(left, chosen)]
    unknown = sum(each is None for each in known)
    minutes = sum(each or 0.0 for each in known) / chosen.jobs / 60
    more = f" and {unknown} runs of unknown length" if unknown else ""
    return f"about {minutes:.0f} min left{more}"


def _seconds(run: Run, rows: dict[Run, Row]) -> float | None:
    for column in (run.column, None):
        times = [
            row["took_seconds"]
            for other, row in rows.items()
            if other.task == run.task and column in (other.column, None)
        ]
        if times:
            return mean(times)
    return None


def _and_later(left: Sequence[Run], chosen: Options) -> Iterator[Run]:
    """Yield the runs, and those that start once the rate of data parallelism is chosen."""
    yield from left
    rates_open = {(run.task, run.column) for run in left if len(COLUMNS[run.column].rates) > 1}
    for task, column in rates_open:
        later = set(chosen.seeds or seeds_of(task)) - {
            run.seed for run in left if run.column == column
        }
        yield from (Run(task, column, seed) for seed in later)


def _clock() -> str:
    return time.strftime("%H:%M:%S")


if __name__ == "__main__":
    main()
