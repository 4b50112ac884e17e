"""A learner of a job that skips bad samples trains as if its data had only the good ones."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

import vcasgd
from vcasgd.errors import NonFiniteLoss, UserCodeError
from vcasgd.session.script import ScriptTask
from vcasgd.spec.job import JobSpec
from vcasgd.task.task import Task
from vcasgd.worker.interval import Base, Trained
from vcasgd.worker.learner import Learner

SAMPLES = 16


class Numbers(Dataset[Tensor]):
    """Features of samples; some raise, are not numbers, or have another shape."""

    def __init__(
        self, raising: Iterable[int] = (), nan: Iterable[int] = (), odd: Iterable[int] = ()
    ):
        self.raising, self.nan, self.odd = set(raising), set(nan), set(odd)
        self.values = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        if index in self.raising:
            raise OSError("truncated file")
        if index in self.odd:
            return torch.ones(2)
        return self.values[index] * (torch.nan if index in self.nan else 1.0)


class Regression(vcasgd.Task):
    batch_size = 8

    def __init__(self, data: Numbers, *, loader_workers: int = 0, **attributes: Any) -> None:
        self.data = data
        self.loader_workers = loader_workers
        vars(self).update(attributes)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def dataset(self, split: str) -> Dataset[Tensor]:
        return self.data

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = (model(batch) - 1).square().mean()
        return loss

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class RootOfZero(Regression):
    """A task whose loss is finite for each sample, and whose gradient isn't for zeros."""

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        zeros = batch.isnan().any(1)
        scores = model(batch.nan_to_num()).squeeze(1).where(~zeros, 0 * model[0].weight.sum())
        loss: Tensor = scores.square().sqrt().mean()
        return loss


def learner_of(task: Task, **fields: Any) -> Learner:
    spec = {
        "name": "job",
        "task": "t:T",
        "epochs": 1,
        "subtasks_per_epoch": 1,
        "on_bad_sample": "skip",
        "update": {"rule": "vc-asgd"},
        **fields,
    }
    return Learner(JobSpec.parse(spec), task, "cpu")


def trained(learner: Learner) -> Trained:
    learner.start_subtask()
    base = Base(*learner.initial())
    try:
        return learner.train(base, 0, 0, SAMPLES)
    finally:
        learner.close()


def without(task: Regression, bad: Iterable[int]) -> Tensor:
    """Return the model after the same steps of a plain loop over the good samples."""
    learner = learner_of(task)
    floats, integers = learner.initial()
    learner._model.load(floats, integers)
    model, optimizer = learner._model.module, task.optimizer(learner._model.module.parameters())
    order = learner.plan.indices(0, 0, SAMPLES).tolist()
    for start in range(0, SAMPLES, task.batch_size):
        good = [index for index in order[start : start + task.batch_size] if index not in bad]
        if good:
            optimizer.zero_grad()
            task.loss(model, torch.stack([task.data[index] for index in good])).backward()
            optimizer.step()
    return learner._model.read()[0]


@pytest.mark.parametrize(
    ("task", "kind", "bad", "loader_workers"),
    [
        (Regression, "raising", [3], 0),
        (Regression, "raising", [0, 5, 9], 2),
        (Regression, "nan", [4], 2),
        (Regression, "nan", [1, 2, 11], 0),
        (Regression, "odd", [6], 0),
        (RootOfZero, "nan", [7], 0),
    ],
)
def test_training_is_that_of_the_good_samples(
    task: type[Regression], kind: str, bad: list[int], loader_workers: int
) -> None:
    data = Numbers(**{kind: bad})
    learner = learner_of(task(data, loader_workers=loader_workers))

    result = trained(learner)

    assert (result.stop, result.skipped) == (SAMPLES, len(bad))
    assert torch.allclose(result.update, without(task(data), bad), atol=1e-6)
    assert sorted(map(int, learner.bad_samples)) == bad


def test_all_micro_batches_of_a_step_lose_their_bad_samples() -> None:
    data = Numbers(raising=[2], nan=[8])
    task = Regression(data, gradient_accumulation_steps=2)

    assert trained(learner_of(task)).skipped == 2


def test_a_step_without_good_samples_changes_nothing() -> None:
    learner = learner_of(Regression(Numbers(raising=range(SAMPLES))))

    result = trained(learner)

    assert (result.skipped, result.loss_sum) == (SAMPLES, 0)
    assert torch.equal(result.update, learner.initial()[0])


def test_a_loss_that_is_never_finite_is_divergence() -> None:
    learner = learner_of(Regression(Numbers(nan=range(SAMPLES)), batch_size=2))

    with pytest.raises(NonFiniteLoss):
        trained(learner)


@pytest.mark.parametrize(
    ("data", "error"), [(Numbers(raising=[3]), UserCodeError), (Numbers(nan=[3]), NonFiniteLoss)]
)
def test_by_default_a_bad_sample_is_a_failure(data: Numbers, error: type[Exception]) -> None:
    with pytest.raises(error):
        trained(learner_of(Regression(data), on_bad_sample="fail"))


SCRIPT = """
import torch, vcasgd
from torch.utils.data import TensorDataset

values = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
values[5] = torch.nan
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
session = vcasgd.Session(model, optimizer)
data = TensorDataset(values)

@session.evaluation(data)
def judge(model, batch):
    return {"count": torch.tensor(len(batch[0]))}
"""
LOOPS = {
    "batches": """
for (batch,) in session.batches(data, 8):
    session.step((model(batch) - 1).square().mean())
""",
    "loader": """
for (batch,) in session.loader(data, 8):
    optimizer.zero_grad()
    (model(batch) - 1).square().mean().backward()
    optimizer.step()
""",
}


@pytest.mark.parametrize(("loop", "skipped"), [("batches", 1), ("loader", 8)])
def test_the_loop_of_a_script_skips_what_it_can(tmp_path: Path, loop: str, skipped: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + LOOPS[loop])
    task = ScriptTask(tmp_path / "train.py", {})
    learner = learner_of(task)

    result = trained(learner)

    assert result.skipped == skipped
    assert torch.isfinite(result.update).all()
    assert not torch.equal(result.update, learner.initial()[0])
    task.close()
