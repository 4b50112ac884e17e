"""Loops with several optimizers end as in a plain loop, or are named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compat import (
    Metrics,
    Points,
    assert_as_plain,
    evaluate_plainly,
    grid,
    loop_script,
    on_workers,
    orders,
    simulated,
    train_plainly,
)
from support.harness import Harness
from torch import nn
from torch.optim import Optimizer

from vcasgd.errors import UserCodeError
from vcasgd.store.ledger.job import JobState
from vcasgd.task.task import Task

pytestmark = pytest.mark.usefixtures("one_thread")


class TwoOptimizers(Points):
    """Muon for matrices, and AdamW for the rest."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
        parameters = list(parameters)
        matrices = [each for each in parameters if each.ndim == 2]
        return [
            torch.optim.Muon(matrices, lr=1e-2),
            torch.optim.AdamW([each for each in parameters if each.ndim != 2], lr=3e-3),
        ]


def two_optimizers_twin(
    task: Points, model: nn.Module, optimizers: Any, epochs: int, seed: int
) -> Metrics:
    together: Any = Together(optimizers)
    return train_plainly(task, model, together, epochs, seed)


class Together:
    """The steps of several optimizers in a loop."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        self.param_groups: list[Any] = []

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()

    def step(self) -> None:
        for each in self.optimizers:
            each.step()


@pytest.mark.extended
@grid
def test_a_list_of_optimizers(workers: int) -> None:
    assert_as_plain(TwoOptimizers, workers, loop=two_optimizers_twin)


LISTED = """
for batch in session.loader(data, batch_size=task.batch_size):
    for each in optimizer:
        each.zero_grad()
    task.loss(model, batch).backward()
    for each in optimizer:
        each.step()
"""


@pytest.mark.ci
def test_a_loop_that_steps_two_optimizers(tmp_path: Path) -> None:
    make_task = loop_script(tmp_path, LISTED, TwoOptimizers)
    ends = [simulated(each, 4, epochs=1)["loss"] for each in (make_task, TwoOptimizers)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)


#: A loop that adds a group to the first of two optimizers.
ADDED = """
batches = session.loader(data, batch_size=64)
for epoch in range(2):
    for batch in batches:
        for each in optimizer:
            each.zero_grad()
        task.loss(model, batch).backward()
        for each in optimizer:
            each.step()
    if epoch == 0:
        optimizer[0].add_param_group({"params": [model[0].bias], "lr": 0.01})
"""


def test_a_loop_may_add_a_group_to_the_first_optimizer(tmp_path: Path) -> None:
    made = "[torch.optim.SGD([model[0].weight], 0.1), torch.optim.SGD(model[2].parameters(), 0.05)]"

    assert simulated(loop_script(tmp_path, ADDED, optimizer=made), 2, epochs=2)["loss"] < 2


#: A loop that steps two optimizers one after the other, as of a generator and its critic, and
#: bounds the parameters.
IN_TURN = """
for batch in session.loader(data, batch_size=task.batch_size):
    for each in {chosen}:
        each.zero_grad()
        task.loss(model, batch).backward()
        each.step()
    for parameter in model.parameters():
        parameter.data.clamp_(-{bound}, {bound})
"""
OPTIMIZERS = "[torch.optim.RMSprop(model[at].parameters(), lr=1e-3) for at in (0, 2)]"
SOMETIMES = "optimizer[: 1 + (session.global_step % 5 == 0)]"


def stepping(folder: Path, chosen: str = "optimizer", bound: float = 100.0) -> Callable[[], Task]:
    loop = IN_TURN.format(chosen=chosen, bound=bound)
    return loop_script(folder, loop, optimizer=OPTIMIZERS)


def in_turn_twin(task: Points, model: Any, _: Optimizer, epochs: int, seed: int) -> Metrics:
    data = task.dataset("train")
    optimizers = [torch.optim.RMSprop(model[at].parameters(), lr=1e-3) for at in (0, 2)]
    for indices in orders(task.samples, epochs, seed, task.batch_size):
        for optimizer in optimizers:
            optimizer.zero_grad()
            task.loss(model, task.collate([data[index] for index in indices])).backward()
            optimizer.step()
    return evaluate_plainly(task, model)


@grid
@pytest.mark.ci
def test_optimizers_that_a_loop_steps_in_turn(tmp_path: Path, workers: int) -> None:
    assert_as_plain(stepping(tmp_path), workers, 2, twin=Points, loop=in_turn_twin)


@pytest.mark.ci
@pytest.mark.parametrize(
    "changes", [{"bound": 0.1}, {"chosen": SOMETIMES}], ids=["bounds parameters", "less often"]
)
def test_a_loop_whose_steps_cannot_be_corrected_is_named(
    harness: Harness, tmp_path: Path, changes: dict[str, Any]
) -> None:
    stepping(tmp_path, **changes)

    _, job = on_workers(harness, tmp_path, "train.py", 2, epochs=2)

    assert job.state is JobState.SUCCEEDED, job.reason
    events = harness.events(job.id, "optimizer-uncorrected")
    assert {each["details"]["optimizer"] for each in events} == {"RMSprop and RMSprop"}


@pytest.mark.ci
def test_a_loop_that_steps_an_optimizer_less_often(tmp_path: Path) -> None:
    def run(chosen: str) -> float:
        return simulated(stepping(tmp_path, chosen), 2, epochs=1)["loss"]

    assert run(SOMETIMES) < 2.2
    # Read after the step of the first one, also for a worker's first batch
    assert run("(e for e in optimizer if e is optimizer[0] or session.global_step % 5 == 0)") < 2.2
    with pytest.raises(UserCodeError, match="without a step of each optimizer") as refused:
        run("optimizer[:1]")
    assert refused.value.remedy is not None
    assert "session.global_step" in refused.value.remedy
