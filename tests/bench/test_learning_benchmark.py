"""The pure parts of ``benchmarks/learning``: what to run, verdicts, and the plain loop."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import vcasgd

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "learning"
MODULES = ("columns", "order", "plain", "rows", "report")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the benchmark's modules, which are scripts."""
    monkeypatch.syspath_prepend(str(FOLDER))
    loaded: dict[str, ModuleType] = {name: importlib.import_module(name) for name in MODULES}
    yield SimpleNamespace(**loaded)
    for name in MODULES:
        del sys.modules[name]


def row(value: float | None, metric: str = "loss", **fields: Any) -> dict[str, Any]:
    """Return a row with a final metric; None if the training diverged."""
    return {
        "metrics": {} if value is None else {metric: value},
        "divergence": None if value is not None else "the loss is nan",
        "rate": 1.0,
        "points": [],
        "bytes_pushed": 2e6,
        "bytes_fetched": 1e6,
        "updates": 10,
        "machines_lost": 0,
        "seconds": 5.0,
        "staleness_mean": 1.0,
        **fields,
    }


# -- rows ----------------------------------------------------------------------------------------


def test_last_row_of_a_run_counts(modules: Any, tmp_path: Path) -> None:
    run, path = modules.columns.Run("svm", "plain", 2), tmp_path / "rows.jsonl"
    outcome = {"points": [{"metrics": {"loss": float("nan")}}], "metrics": {}, "divergence": "nan"}

    modules.rows.append(run, {**outcome, "took_seconds": 1.0}, path)
    modules.rows.append(run, {**outcome, "took_seconds": 2.0}, path)
    with path.open("a") as file:
        file.write('{"task": "svm", "colu')  # A crash cut it off.
    found = modules.rows.read(path)

    assert found.keys() == {run}
    assert found[run]["took_seconds"] == 2.0
    assert found[run]["digest"] == modules.rows.digest(run)
    assert found[run]["points"][0]["metrics"]["loss"] is None, "NaN is not JSON"


# -- what to run -------------------------------------------------------------------------------


def test_rate_is_chosen_before_the_other_seeds_run(modules: Any) -> None:
    run, rates = modules.columns.Run, modules.columns.COLUMNS["parallel-4"].rates
    assert rates == (1, 2, 4)
    first = [run("lstm", "parallel-4", 0, rate) for rate in rates]

    def missing(rows: Any) -> Any:
        return modules.rows.missing(["lstm"], ["parallel-4"], (0, 1), rows, lambda *_: True)

    assert missing({}) == first
    rows = dict(zip(first, [row(1.0), row(0.5), row(None)], strict=True))
    assert missing(rows) == [run("lstm", "parallel-4", 1, 2)]
    assert missing({**rows, run("lstm", "parallel-4", 1, 2): row(0.6)}) == []


# -- verdicts ----------------------------------------------------------------------------------


def cells_of(modules: Any, task: str, values: dict[str, list[float | None]]) -> Any:
    metric = modules.rows.metric(task)
    rows = {
        modules.columns.Run(task, column, seed): row(value, metric)
        for column, seeds in values.items()
        for seed, value in enumerate(seeds)
    }
    for column in modules.columns.COLUMNS.values():
        for rate in column.rates[1:]:
            if column.name in values:
                rows[modules.columns.Run(task, column.name, 0, rate)] = row(None, metric)
    return modules.report.cells(rows)


@pytest.mark.parametrize(
    ("task", "column", "values", "verdicts"),
    [
        ("cifar10", "plain", [0.82, 0.82], []),
        ("cifar10", "workers-4", [0.82, 0.816], ["0.40 points worse than plain, ≤ 0.5 ✓"]),
        ("cifar10", "workers-8", [0.82, 0.809], ["1.10 points worse than plain, ≤ 1 ✗"]),
        ("text", "workers-2", [2.0, 2.008], ["0.40 % worse than plain, ≤ 0.5 ✓"]),
        ("text", "workers-8", [2.0, 2.042], ["2.10 % worse than plain, ≤ 2 ✗"]),
    ],
)
def test_accuracy_is_compared_in_points_and_loss_in_percent(
    modules: Any, task: str, column: str, values: list[float], verdicts: list[str]
) -> None:
    measured = cells_of(modules, task, {"plain": values[:1], column: values[1:]})

    assert [str(each) for each in modules.report.verdicts(measured, task, column)] == verdicts


# -- the plain loop ----------------------------------------------------------------------------


class Line(vcasgd.Task):
    """One weight that is pulled to the mean of its samples."""

    batch_size = 4

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1, bias=False)

    def dataset(self, split: str) -> Any:
        return torch.arange(9.0).unsqueeze(1)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = (model.weight - batch).square().mean() / 2
        return loss

    def evaluate(self, model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"weight": model.weight.sum() * len(batch), "count": torch.tensor(len(batch))}


def test_plain_loop_has_every_sample_in_each_epoch(modules: Any) -> None:
    cut = list(modules.plain.batches(9, epoch=2, seed=3, size=4))

    assert [len(batch) for batch in cut] == [4, 5], "a single last sample joins a batch"
    assert sorted(index for batch in cut for index in batch) == list(range(9))


def test_data_parallelism_makes_the_step_of_the_common_batch(modules: Any) -> None:
    weight = modules.plain.train(Line(), 1, seed=0, machines=4, rate=2.0).points[0]["metrics"]

    # A rate of 1 replaces the weight by the mean of all samples.
    assert weight["weight"] == pytest.approx(4.0)
