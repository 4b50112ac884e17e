"""Rows of ``results/learning.jsonl``: one for each finished run, with a digest of its code.

A row is current while the code and the settings that decide its outcome are the same; comments,
docstrings, and formatting don't count.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from columns import COLUMNS, HERE, SEEDS, Run, conditions, job_fields, job_spec, seeds_of
from order import order

import vcasgd

RESULTS = HERE.parent / "results" / "learning.jsonl"
#: Seed on which the learning rate of data parallelism is chosen.
RATE_SEED = SEEDS[0]

Row = dict[str, Any]

#: Code behind the asynchronous columns, relative to the package.
ASYNCHRONOUS = (
    "learning/**/*.py",
    "task/task.py",
    "worker/learner.py",
    "worker/findings.py",
    "worker/trial_steps.py",
    "worker/member.py",
    "worker/interval.py",
    "worker/update_queue.py",
    "parameter_server/blend.py",
    "parameter_server/round_members.py",
    "simulation/*.py",
    "fleet/histories.py",
)


#: Fields of a job that don't decide what it learns in the simulator.
ELSEWHERE = {
    *("name", "working_dir", "workers", "checkpoint", "data", "labels", "priority", "weight"),
    *("env", "secrets", "requirements", "setup", "track"),
}
#: What a run with other code must have in common with an earlier one to confirm it.
OUTCOME = ("points", "updates", "staleness", "bytes_pushed", "bytes_fetched", "divergence")
#: Columns of which a run confirms the others of a task.
PROBES = ("trace-4", "workers-4")


# -- digest ------------------------------------------------------------------------------------


def digest(run: Run) -> str:
    """Return a digest of everything that decides the outcome of a run.

    It is the digest of the settings and, with workers, a dash and that of the package's code.
    """
    fields = job_fields(run.task)
    module, _, _ = fields["task"].partition(":")
    files = [Path(fields["working_dir"]) / f"{module}.py"]
    # What the order of samples is, instead of the code that makes it.
    settings: list[Any] = [asdict(run), fields["args"], fields["epochs"], order(100, 0, epoch=2)]
    parts: list[str] = []
    if run.asynchronous:
        spec = job_spec(run, fields)
        settings.append(spec.model_dump(mode="json", exclude=ELSEWHERE))
        settings += [spec.workers.max, spec.push_interval, spec.keeps_optimizer]
        settings.append(asdict(conditions(run, batch=1)))
    else:
        settings.append(COLUMNS[run.column].machines)
        files.append(HERE / "plain.py")
    parts += [json.dumps(settings, sort_keys=True), *(code(path) for path in files)]
    of_settings = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    return f"{of_settings}-{code_digest()}" if run.asynchronous else of_settings


def code_digest() -> str:
    """Return a digest of the code behind asynchronous training."""
    return hashlib.sha256(package_code().encode()).hexdigest()[:12]


@cache
def package_code() -> str:
    """Return the code behind asynchronous training.

    Raises FileNotFoundError if a pattern matches no module, so that a renamed one isn't left out.
    """
    root = Path(vcasgd.__file__).parent
    found = {pattern: list(root.glob(pattern)) for pattern in ASYNCHRONOUS}
    if unmatched := [pattern for pattern, paths in found.items() if not paths]:
        raise FileNotFoundError(f"ASYNCHRONOUS: no module matches {', '.join(unmatched)}")
    paths = sorted({path for paths in found.values() for path in paths})
    return "\0".join(code(path) for path in paths)


@cache
def code(path: Path) -> str:
    """Return a module's code without comments and docstrings."""
    return stripped(path.read_text())


def stripped(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


# -- rows --------------------------------------------------------------------------------------


def read(path: Path = RESULTS) -> dict[Run, Row]:
    """Return the latest row of each run. A line that a crash cut off is ignored."""
    rows: dict[Run, Row] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[Run(row["task"], row["column"], row["seed"], row["rate"])] = row
    return rows


def append(run: Run, outcome: dict[str, Any], path: Path = RESULTS) -> Row:
    """Store the outcome of a run as one line."""
    fields = job_fields(run.task)
    # Sums are rounded otherwise with other instructions, and long trainings end otherwise.
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    settings = {"epochs": fields["epochs"], "args": fields["args"]}
    if run.asynchronous:
        spec = job_spec(run, fields)
        settings["job"] = spec.model_dump(
            mode="json", exclude={"working_dir", "seed", "args", "epochs"}, exclude_defaults=True
        )
    row = {
        **asdict(run),
        "digest": digest(run),
        "settings": settings,
        "versions": versions,
        **outcome,
    }
    with path.open("a") as file:
        # Without NaN, which isn't JSON: a training that diverged says so.
        file.write(json.dumps(_finite(row)) + "\n")
    return row


def probes(task: str, rows: dict[Run, Row]) -> dict[str, list[Run]]:
    """Return the stale runs of a task that have to be repeated to confirm its others, by code."""
    stale = [
        run
        for run, row in rows.items()
        if run.task == task and run.asynchronous and row["digest"] != digest(run)
    ]
    found: dict[str, dict[str, Run]] = {}
    for run in sorted(stale, key=lambda run: run.seed, reverse=True):
        if run.column in PROBES:
            found.setdefault(rows[run]["digest"].partition("-")[2], {})[run.column] = run
    return {code: list(runs.values()) for code, runs in found.items()}


def confirm(task: str, before: str, path: Path = RESULTS) -> int:
    """Count a task's rows with the code ``before`` as rows of the present code.

    Returns how many. Rows of other settings stay stale.
    """
    rows, confirmed = [json.loads(line) for line in path.read_text().splitlines()], 0
    for row in rows:
        if row["task"] == task and row["digest"].endswith(f"-{before}"):
            row["digest"] = row["digest"].replace(before, code_digest())
            confirmed += 1
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(row) + "\n" for row in rows))
    new.replace(path)
    return confirmed


def same_outcome(row: Row, outcome: Row) -> bool:
    """Return True if a run ended exactly as an earlier one."""
    again = json.loads(json.dumps(_finite(outcome)))
    return all(row.get(name) == again.get(name) for name in OUTCOME)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    return value


# -- what to run -------------------------------------------------------------------------------


def missing(
    tasks: Iterable[str],
    columns: Iterable[str],
    seeds: Sequence[int] | None,
    rows: dict[Run, Row],
    is_current: Any,
) -> list[Run]:
    """Return the runs without a current row that can start now, in order.

    The learning rate of data parallelism is chosen first: until all rates have run with
    :data:`RATE_SEED`, the other seeds can't start. Without ``seeds``, each task has its own.
    """
    current = {run: row for run, row in rows.items() if is_current(run, row)}
    wanted: list[Run] = []
    for task in tasks:
        for name in columns:
            rates = COLUMNS[name].rates
            if len(rates) > 1:
                wanted += [Run(task, name, RATE_SEED, rate) for rate in rates]
            best = best_rate(task, name, current)
            if best is not None:
                wanted += [Run(task, name, seed, best) for seed in seeds or seeds_of(task)]
    return [run for run in dict.fromkeys(wanted) if run not in current]


def best_rate(task: str, column: str, rows: dict[Run, Row]) -> float | None:
    """Return the rate with the best result; None if one hasn't run."""
    rates = COLUMNS[column].rates
    if len(rates) == 1:
        return rates[0]
    runs = [Run(task, column, RATE_SEED, rate) for rate in rates]
    if any(run not in rows for run in runs):
        return None
    return min(runs, key=lambda run: badness(task, rows[run])).rate


def badness(task: str, row: Row) -> float:
    """Return the task's metric, with its sign set so that lower is better; ∞ if it diverged."""
    value: float | None = row["metrics"].get(metric(task))
    if row["divergence"] or value is None:
        return float("inf")
    return -value if metric(task) == "accuracy" else value


def metric(task: str) -> str:
    """Return the name of the metric that decides for a task."""
    return "loss" if task in ("text", "lstm", "vae") else "accuracy"
