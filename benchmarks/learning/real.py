"""Measure seconds to a target loss on real processes: ``python benchmarks/learning/real.py``.

Trains a task with one process, with a real job (ledger, tensors server, parameter server, and
worker processes on this machine), and with synchronous data parallelism (torch.distributed with
gloo) on as many processes, one after the other. Every process has one thread. The target is what
one process reaches. Stop other programs before you run it.

Time counts from the moment when all processes have imported torch, and includes evaluations.
Appends one line to ``results/learning-real.jsonl``; ``report.py`` writes the table.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from columns import DATA, HERE, TASKS, job_fields, make_task
from plain import train
from processes import TRAINING_SECONDS, logs, start, wait_until
from rows import best_rate, metric, read

RESULTS = HERE.parent / "results" / "learning-real.jsonl"
#: A result this much worse than the final one of one process is the target.
WITHIN = 1.01

Points = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, default="text")
    parser.add_argument("--workers", nargs="+", type=int, choices=(1, 2, 4, 8), default=[2, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    parser.add_argument("--to", type=Path, default=RESULTS, help="file that gets the line")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--machines", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        _be_a_machine(options)
        return
    # Imported here, because the processes of data parallelism don't need it.
    from real_job import asynchronous

    os.environ["OMP_NUM_THREADS"] = "1"
    contenders = [_measured("one process", parallel, options, 1)]
    for count in options.workers:
        contenders.append(_measured(f"{count} workers", asynchronous, options, count))
        contenders.append(_measured(f"data parallel, {count}", parallel, options, count))
    row = {
        "task": options.task,
        "seed": options.seed,
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cores": os.cpu_count(),
        "contenders": contenders,
    }
    with options.to.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print("\n".join(table([row])))


def _measured(
    title: str,
    contender: Callable[[argparse.Namespace, int], dict[str, Any]],
    options: argparse.Namespace,
    count: int,
) -> dict[str, Any]:
    print(f"{options.task}: {title}", flush=True)
    return {"title": title, "machines": count, **contender(options, count)}


# -- the table ---------------------------------------------------------------------------------


def seconds_to(points: Points, name: str, target: float) -> float | None:
    """Return when a metric reached the target, interpolated; None if it didn't.

    Accuracy rises to its target, and any other metric falls to it.
    """
    sign = -1.0 if name == "accuracy" else 1.0
    places = [(each["seconds"], sign * each["metrics"][name]) for each in points]
    target *= sign
    if places and places[0][1] <= target:
        return float(places[0][0])
    for (before, above), (after, below) in pairwise(places):
        if below <= target < above:
            return float(before + (after - before) * (above - target) / (above - below))
    return None


def target_of(row: dict[str, Any]) -> float:
    """Return the metric that counts as reached: nearly the final one of one process."""
    name = metric(row["task"])
    final: float = row["contenders"][0]["points"][-1]["metrics"][name]
    return final / WITHIN if name == "accuracy" else final * WITHIN


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of the last measurement of each task."""
    yield "| task | processes | seconds to target | speed-up | final | staleness |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in {row["task"]: row for row in rows}.values():
        name, target = metric(row["task"]), target_of(row)
        alone = seconds_to(row["contenders"][0]["points"], name, target)
        for each in row["contenders"]:
            needed = seconds_to(each["points"], name, target)
            speed = f"{alone / needed:.2f} ×" if alone and needed else ""
            final = each["points"][-1]["metrics"][name]
            staleness = each.get("staleness_mean")
            yield (
                f"| `{row['task']}`, {name} {target:.4f} | {each['title']} "
                f"| {'never' if needed is None else f'{needed:.1f}'} | {speed} | {final:.4f} "
                f"| {'' if staleness is None else f'{staleness:.1f}'} |"
            )


def read_rows(path: Path = RESULTS) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# -- one process and data parallelism ----------------------------------------------------------


def parallel(options: argparse.Namespace, machines: int) -> dict[str, Any]:
    """Train with synchronous data parallelism; a single machine is one plain process."""
    rate = 1.0 if machines == 1 else best_rate(options.task, f"parallel-{machines}", read())
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--task", options.task, "--seed", str(options.seed),
                     "--data", str(options.data), "--machines", str(machines),
                     "--rate", str(rate or machines**0.5), "--folder", folder]  # fmt: skip
        processes = [
            start([__file__, *arguments, "--rank", str(rank)], Path(folder) / f"{rank}.log", {})
            for rank in range(machines)
        ]
        wait_until(lambda: all(each.poll() is not None for each in processes), TRAINING_SECONDS)
        if any(each.returncode for each in processes):
            raise SystemExit(logs(Path(folder)))
        result: dict[str, Any] = json.loads((Path(folder) / "points.json").read_text())
    return {"points": result["points"], "rate": rate}


def _be_a_machine(options: argparse.Namespace) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{options.folder}/rendezvous",
        rank=options.rank,
        world_size=options.machines,
    )
    distributed.barrier()
    fields, started = job_fields(options.task), time.monotonic()
    task = make_task(fields, options.data)
    prepared = time.monotonic() - started
    training = train(
        task,
        fields["epochs"],
        options.seed,
        machines=options.machines,
        rate=options.rate,
        rank=options.rank if options.machines > 1 else None,
    )
    if options.rank == 0:
        for point in training.points:
            point["seconds"] += prepared
        (options.folder / "points.json").write_text(json.dumps(asdict(training)))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
