"""A task with random noise, and a machine that trains it one interval after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils.data import TensorDataset

import vcasgd
from vcasgd.spec.job import JobSpec
from vcasgd.verification.state import LearnerState, NotRepeatable
from vcasgd.verification.verifier import IntervalFacts, RepeatingLearner, state_of
from vcasgd.worker.interval import Base, Trained
from vcasgd.worker.learner import Learner

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "momentum": lambda each: SGD(each, lr=0.05, momentum=0.9),
    "plain": lambda each: SGD(each, lr=0.05),
    "adam": lambda each: Adam(each, lr=0.01),
    "adamw": lambda each: AdamW(each, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda each: RMSprop(each, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda each: Adagrad(each, lr=0.01),
}


class Noisy(vcasgd.Task):
    """A task with random noise, running statistics, and a schedule."""

    batch_size = 8
    min_local_batch = 2
    clip_norm = 1.0

    def __init__(self, make: MakeOptimizer = OPTIMIZERS["momentum"]) -> None:
        self.make = make

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))

    def dataset(self, split: str) -> TensorDataset:
        random = torch.Generator().manual_seed(1)
        return TensorDataset(
            torch.randn(160, 4, generator=random), torch.randint(0, 3, (160,), generator=random)
        )

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self.make(list(parameters))

    def schedule(self, progress: float) -> float:
        return 1.0 - progress / 2

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points, labels = batch
        return F.cross_entropy(model(points), labels)


class Machine:
    """A learner that trains one interval after the other, as a worker does."""

    def __init__(self, task: vcasgd.Task, subtask: int = 0, **fields: Any) -> None:
        spec = {"name": "j", "task": "t:T", "epochs": 2, "subtasks_per_epoch": 4,
                "workers": {"max": 2}, "push_every": 2, **fields}  # fmt: skip
        self.learner = Learner(JobSpec.parse(spec), task, "cpu")
        self.learner.start_subtask()
        self.base = self.learner.initial()
        self.subtask, self.position, self.rollbacks = subtask, 0, 0

    def interval(
        self, most: int | None = None
    ) -> tuple[LearnerState, Trained, LearnerState, IntervalFacts]:
        """Train an interval, of at most so many steps; move the base by the update."""
        learner, steps = self.learner, 0
        planned = learner.interval_stop(self.subtask, self.position)

        def count() -> bool:
            nonlocal steps
            steps += 1
            return steps == most

        before = state_of(learner)
        trained = learner.train(
            Base(*(each.clone() for each in self.base), self.rollbacks),
            *(self.subtask, self.position, planned),
            after_step=count,
        )
        member = learner.member
        facts = IntervalFacts(
            *(self.subtask, self.position, trained.stop, planned),
            member.batch if member else 0.0,
            self.rollbacks,
        )
        self.position = trained.stop
        return before, trained, state_of(learner), facts

    def move(self, trained: Trained) -> None:
        floats, at = self.base[0].clone(), self.learner.layout.parameters
        floats[:at] += trained.update[:at]
        floats[at:] = trained.update[at:]
        self.base = floats, trained.integers


def assert_not_repeated(machine: Machine) -> None:
    """Assert that a machine of one's own repeats nothing, and keeps its state."""
    before, _, after, facts = machine.interval()

    with pytest.raises(NotRepeatable):
        RepeatingLearner(machine.learner).repeat(facts, machine.base, before)

    assert state_of(machine.learner).digest == after.digest
