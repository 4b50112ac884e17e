"""State beside the model: averages of its parameters end as in a plain loop."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from support.compat import (
    Case,
    Metrics,
    Points,
    assert_as_plain,
    evaluate_plainly,
    grid,
    on_workers,
    orders,
    simulated,
)
from support.harness import Harness
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from vcasgd.store.ledger.job import JobState

pytestmark = pytest.mark.usefixtures("one_thread")
DECAY = 0.98


class Averaged(Points):
    """A task whose rate is so high that the average is better than the model."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plainly_averaged(seed: int, epochs: int = 2) -> Metrics:
    """Train in a plain loop that averages after each step, and evaluate the average."""
    task = Averaged()
    torch.manual_seed(seed)
    model = task.model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)
    optimizer, data = task.optimizer(model.parameters()), task.dataset("train")
    for indices in orders(len(data), epochs, seed, task.batch_size):
        optimizer.zero_grad()
        task.loss(model, task.collate([data[index] for index in indices])).backward()
        optimizer.step()
        average.update_parameters(model)
    return evaluate_plainly(task, average.module)


@grid
def test_the_average_is_that_of_a_plain_loop(workers: int) -> None:
    ema = {"ema": {"decay": DECAY, "evaluate": "instead"}}

    assert_as_plain(Case(Averaged, epochs=2, twin=plainly_averaged, fields=ema), workers)


TASK = """
import sys

import torch

sys.path.insert(0, {tests!r})
from support.compat import Points


class Averaged(Points):
    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""


def test_a_worker_that_is_alone_publishes_often_enough(harness: Harness, tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    (tmp_path / "train.py").write_text(TASK.format(tests=tests))

    metrics, job = on_workers(harness, tmp_path, "train:Averaged", 1, epochs=2, ema=DECAY)

    assert job.state is JobState.SUCCEEDED, job.reason
    assert metrics["ema_loss"] == pytest.approx(plainly_averaged(0)["loss"], rel=0.01)


def test_the_average_is_measured_beside_the_model() -> None:
    means = simulated(Averaged, 2, epochs=2, ema=DECAY)

    assert means["ema_loss"] < means["loss"]
    assert simulated(Averaged, 2, epochs=2)["loss"] == means["loss"]
