"""Features of users' tasks: their effect on local steps and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

import vcasgd
from vcasgd.learning.encodings.encoder import Encoder
from vcasgd.learning.encodings.rows import MIN_ROWS, Table, tables_of
from vcasgd.spec.job import JobSpec
from vcasgd.worker.interval import Base, Trained
from vcasgd.worker.learner import Learner

SAMPLES, STEPS = 8, 2
DELTA = {"rule": "async-local-sgd"}


class Plain(vcasgd.Task):
    """Least squares on eight samples: two local steps of four each."""

    batch_size = 4

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def dataset(self, split: str) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(SAMPLES, 3, generator=generator))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = (model(batch[0]) - 1).square().mean()
        return loss


def learner_of(task: vcasgd.Task, device: str = "cpu", **fields: Any) -> Learner:
    spec = {"name": "job", "task": "t:T", "epochs": 2, "subtasks_per_epoch": 1, **fields}
    learner = Learner(JobSpec.parse({"update": DELTA, **spec}), task, device)
    learner.start_subtask()
    return learner


def interval(learner: Learner, base: Base, subtask: int = 0) -> Trained:
    return learner.train(base, subtask, 0, SAMPLES)


def first(learner: Learner) -> tuple[Base, Trained]:
    base = Base(*learner.initial())
    return base, interval(learner, base)


def named(learner: Learner, floats: Tensor) -> dict[str, Tensor]:
    """Return the tensors in a float32 vector of a model."""
    integers = torch.zeros(learner.layout.integers, dtype=torch.int64)
    return {entry.name: entry.view(floats, integers) for entry in learner.layout.entries}


class Half(Plain):
    """A task with mixed precision, as in any training script."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            loss: Tensor = (model(batch[0]) - 1).square().mean()
        assert model(batch[0]).dtype == torch.float32
        return loss.float()


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
        ),
    ],
)
def test_mixed_precision_in_the_loss_leaves_parameters_and_updates_float32(device: str) -> None:
    _, exact = first(learner_of(Plain(), device))
    _, mixed = first(learner_of(Half(), device))

    assert mixed.update.dtype == torch.float32
    assert mixed.update.device.type == "cpu"
    assert not torch.equal(mixed.update, exact.update), "the forward pass rounds"
    torch.testing.assert_close(mixed.update, exact.update, rtol=0.05, atol=0.01)


class Table256(Plain):
    """An embedding whose rows 0 to 7 are touched by the eight samples."""

    def __init__(self, optimizer: Callable[[Any], Optimizer], *, sparse: bool) -> None:
        self._optimizer = optimizer
        self._sparse = sparse

    def model(self) -> nn.Module:
        return nn.Embedding(MIN_ROWS, 4, sparse=self._sparse)

    def dataset(self, split: str) -> Dataset[Any]:
        return TensorDataset(torch.arange(SAMPLES))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self._optimizer(parameters)


@pytest.mark.parametrize(
    ("optimizer", "sparse", "rows"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), False, SAMPLES),
        (lambda p: torch.optim.SGD(p, lr=0.1), True, SAMPLES),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), False, SAMPLES),
        (lambda p: torch.optim.SparseAdam(list(p), lr=0.1), True, SAMPLES),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), False, MIN_ROWS),
    ],
    ids=["sgd", "sgd sparse", "adagrad", "sparse adam", "weight decay"],
)
def test_rows_that_no_sample_touched_are_not_sent(
    optimizer: Callable[[Any], Optimizer], sparse: bool, rows: int
) -> None:
    learner = learner_of(Table256(optimizer, sparse=sparse), update={**DELTA, "codec": "rows"})
    (part,) = learner.cut(1).parts
    assert tables_of(learner.layout, part) == (Table(0, MIN_ROWS, 4),)

    _, trained = first(learner)

    # The number of rows, and each row's number and four floats.
    encoder = Encoder(learner.spec.update, learner.layout, part)
    assert len(encoder.encode(trained.update, last=False)) == 4 * (1 + rows * (1 + 4))


class Normed(Plain):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))


def test_running_statistics_and_counters_are_sent_as_values() -> None:
    learner = learner_of(Normed())
    base = Base(*learner.initial())

    # Given a snapshot with ten steps of other workers
    base.integers.fill_(10)
    trained = interval(learner, base)

    assert trained.integers.tolist() == [10 + STEPS]
    sent = named(learner, trained.update)
    model = dict(learner._model.module.named_buffers())
    assert torch.equal(sent["0.running_var"], model["0.running_var"])
    changed = (
        dict(learner._model.module.named_parameters())["1.weight"]
        - named(learner, base.floats)["1.weight"]
    )
    assert torch.equal(sent["1.weight"], changed)


def test_a_last_push_ends_one_of_the_last_subtasks() -> None:
    # Given 2 epochs of 20 subtasks of 4 samples, for at most 3 workers
    class Many(Plain):
        def dataset(self, split: str) -> Dataset[Any]:
            return TensorDataset(torch.randn(80, 3))

    learner = learner_of(Many(), subtasks_per_epoch=20, workers={"max": 3})

    # Then the last twelve of the forty end with one
    ends = [subtask for subtask in range(40) if learner.is_last(subtask, 4)]
    assert ends == list(range(28, 40))
    assert not any(learner.is_last(subtask, 2) for subtask in range(40))
