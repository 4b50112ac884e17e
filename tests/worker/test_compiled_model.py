"""A task whose model is compiled: vectors, names, and the number of compilations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

import vcasgd
from vcasgd.learning.layout import Layout
from vcasgd.spec.job import JobSpec
from vcasgd.worker.interval import Base
from vcasgd.worker.learner import Learner

DATA = torch.linspace(-1, 1, 64 * 4).reshape(64, 4)


class Network(nn.Module):
    """Dropout and BatchNorm, because compiled code depends on their mode, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8).requires_grad_(False)
        self.rest: nn.Module = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 1))

    def forward(self, batch: Tensor) -> Tensor:
        result: Tensor = self.rest(self.first(batch))
        return result


class Compiled(vcasgd.Task):
    """Compiles the whole model, a part of it, or nothing."""

    batch_size = 8
    evaluation_batch_size = 8

    def __init__(self, how: str) -> None:
        self.how = how
        self.compilations = 0

    def compiled(self, module: nn.Module) -> Any:
        def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
            self.compilations += 1
            return graph.forward

        return torch.compile(module, backend=backend)

    def model(self) -> nn.Module:
        network = Network()
        if self.how == "part":
            network.rest = self.compiled(network.rest)
        return self.compiled(network) if self.how == "whole" else network

    def dataset(self, split: str) -> Dataset[Any]:
        return TensorDataset(DATA)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        mean: Tensor = model(batch[0]).square().mean()
        return mean

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": model(batch[0]).sum(), "count": torch.tensor(len(batch[0]))}


def run(task: Compiled) -> tuple[Layout, Tensor, dict[str, float], list[int]]:
    """Train six intervals with an evaluation between any two, each from a model of its own.

    Return the layout, the last update, the last metrics, and the compilations after each interval.
    """
    torch.compiler.reset()
    spec = {"name": "job", "task": "t:T", "epochs": 6, "subtasks_per_epoch": 1}
    learner = Learner(JobSpec.parse({**spec, "update": {"rule": "async-local-sgd"}}), task, "cpu")
    floats, integers = learner.initial()
    compilations = []
    metrics: dict[str, float] = {}

    def never() -> bool:
        return False

    for subtask in range(6):
        learner.start_subtask()
        done = learner.train(*(Base(floats, integers), subtask, 0, 64))
        floats, integers = floats + done.update, done.integers
        metrics = learner.evaluate(floats, integers)
        compilations.append(task.compilations)
    return learner.layout, floats, metrics, compilations


@pytest.mark.parametrize("how", ["whole", pytest.param("part", marks=pytest.mark.extended)])
@pytest.mark.ci
def test_compiled_model_trains_like_any_other(how: str) -> None:
    layout, floats, metrics, compilations = run(Compiled(how))
    plain_layout, plain_floats, plain_metrics, _ = run(Compiled("no"))
    # A machine that compiles and one that doesn't can share a job, and files have the usual names.
    assert layout == plain_layout
    assert layout.digest() == plain_layout.digest()
    assert {each.name for each in layout.base} == {"first.weight", "first.bias"}
    torch.testing.assert_close(floats, plain_floats)
    assert metrics == pytest.approx(plain_metrics)
    # Once for training and once for evaluation, not once an interval.
    assert compilations == [2] * 6


@pytest.mark.ci
def test_session_with_a_compiled_model() -> None:
    task = Compiled("whole")
    model = task.model()
    session = vcasgd.Session(model, task.optimizer(model.parameters()))
    before = [each.detach().clone() for each in model.parameters()]
    for batch in session.batches(TensorDataset(DATA), 8, epochs=2):
        session.step(task.loss(model, batch))
    assert any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert task.compilations == 1
