"""The examples of all integrations learn with two workers, also when workers are killed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.examples import finish_although_workers_die
from support.harness import Harness

from vcasgd.fleet.histories import always
from vcasgd.simulation.job import Conditions, Simulation
from vcasgd.spec.job import JobSpec
from vcasgd.task.task import load_task

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Library that each example needs.
LIBRARIES = {
    "accelerate": "accelerate",
    "huggingface": "transformers",
    "lightning": "lightning",
    "sft": "trl",
}


@pytest.fixture
def folder(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an example's folder; trainers use one thread, and write elsewhere."""
    pytest.importorskip(LIBRARIES[example], reason="needs the extra of this integration")
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield EXAMPLES / example
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("example", "args", "every", "bounds"),
    [
        ("lightning", {}, 10, {"accuracy": 0.93, "loss": 0.3}),
        pytest.param(
            *("huggingface", {"epochs": 4}, 4, {"accuracy": 0.9, "loss": 0.5}),
            marks=pytest.mark.extended,
        ),
        pytest.param(
            *("sft", {}, 10, {"loss": 0.3}), marks=[pytest.mark.extended, pytest.mark.slow]
        ),
    ],
)
@pytest.mark.ci
def test_the_example_learns_with_two_workers(
    folder: Path, args: dict[str, Any], every: int, bounds: dict[str, float]
) -> None:
    job = JobSpec.load(folder / "job.yaml")
    job = job.model_copy(update={"args": {**job.args, **args}})
    make_task = partial(load_task, job.task, job.args, folder)

    (point,) = Simulation(job, make_task, Conditions(always(2)), evaluate_every=every).run().points

    assert point.metrics.get("accuracy", 1.0) >= bounds.get("accuracy", 0.0)
    assert point.metrics["loss"] < bounds["loss"]


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "samples", "epochs", "args", "bounds"),
    [
        ("accelerate", 1437, 20, {"epochs": 20, "accumulate": 1}, {"accuracy": 0.93}),
        ("accelerate", 1437, 20, {"epochs": 20, "accumulate": 2}, {"accuracy": 0.93}),
        ("huggingface", 824, 12, {"epochs": 12}, {"accuracy": 0.95}),
        ("lightning", 1437, 20, {}, {"accuracy": 0.93}),
        ("sft", 256, 10, {}, {"loss": 0.3}),
    ],
)
def test_the_example_learns_although_two_workers_are_killed(
    harness: Harness,
    folder: Path,
    samples: int,
    epochs: int,
    args: dict[str, Any],
    bounds: dict[str, float],
) -> None:
    done = finish_although_workers_die(harness, folder, samples=samples, epochs=epochs, args=args)
    assert done.best is not None
    assert done.best.metrics.get("accuracy", 1.0) >= bounds.get("accuracy", 0.0)
    assert done.best.metrics["loss"] < bounds.get("loss", float("inf"))
