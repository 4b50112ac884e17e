"""Loops with several optimizers end as in a plain loop, or are named."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compat import (
    SEEDS,
    Case,
    Points,
    assert_as_plain,
    assert_close,
    evaluate_plainly,
    grid,
    on_workers,
    orders,
    script,
    simulated,
    train_plainly,
)
from support.harness import Harness
from torch import nn
from torch.optim import Optimizer

from vcasgd.errors import UserCodeError
from vcasgd.store.ledger.job import JobState

pytestmark = pytest.mark.usefixtures("one_thread")


class TwoOptimizers(Points):
    """Muon for matrices, and AdamW for the rest."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> list[Optimizer]:  # type: ignore[override]
        parameters = list(parameters)
        matrices = [each for each in parameters if each.ndim == 2]
        return [
            torch.optim.Muon(matrices, lr=1e-2),
            torch.optim.AdamW([each for each in parameters if each.ndim != 2], lr=3e-3),
        ]


def two_optimizers_twin(seed: int) -> dict[str, float]:
    task = TwoOptimizers()
    torch.manual_seed(seed)
    model = task.model()
    return train_plainly(task, model, Together(task.optimizer(model.parameters())), 4, seed)


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
    assert_as_plain(Case(TwoOptimizers, twin=two_optimizers_twin), workers)


LISTED = """
import sys
import torch
import vcasgd

sys.path[:0] = [{support!r}, {support!r} + "/compat"]
from test_several_optimizers import TwoOptimizers

points = TwoOptimizers()
model = points.model()
matrices, rest = points.optimizer(model.parameters())
session = vcasgd.Session(model, [matrices, rest])
evaluate = session.evaluation(points.dataset("validation"))(points.evaluate)
for batch in session.loader(points.dataset("train"), batch_size=points.batch_size):
    matrices.zero_grad()
    rest.zero_grad()
    points.loss(model, batch).backward()
    matrices.step()
    rest.step()
"""


@pytest.mark.ci
def test_a_loop_that_steps_two_optimizers(tmp_path: Path) -> None:
    make_task = script(LISTED.format(support=str(Path(__file__).parents[1])), tmp_path)
    ends = [simulated(each, 4, epochs=1)["loss"] for each in (make_task, TwoOptimizers)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)


#: A loop that steps two optimizers one after the other, as of a generator and its critic, and
#: bounds the parameters.
IN_TURN = """
import sys
import torch
import vcasgd

sys.path.insert(0, {support!r})
from support.compat import Points

points = Points()
model = points.model()
optimizers = [torch.optim.RMSprop(model[at].parameters(), lr=1e-3) for at in (0, 2)]
session = vcasgd.Session(model, optimizers)
evaluate = session.evaluation(points.dataset("validation"))(points.evaluate)
for batch in session.loader(points.dataset("train"), batch_size=points.batch_size):
    for optimizer in optimizers:
        optimizer.zero_grad()
        points.loss(model, batch).backward()
        optimizer.step()
    for parameter in model.parameters():
        parameter.data.clamp_(-{bound}, {bound})
"""


def in_turn_twin(seed: int, bound: float) -> dict[str, float]:
    torch.manual_seed(seed)
    points = Points()
    model, data = points.model(), points.dataset("train")
    optimizers = [torch.optim.RMSprop(model[at].parameters(), lr=1e-3) for at in (0, 2)]  # type: ignore[index]
    for indices in orders(len(data), 2, seed, points.batch_size):  # type: ignore[arg-type]
        for optimizer in optimizers:
            optimizer.zero_grad()
            points.loss(model, points.collate([data[index] for index in indices])).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        for parameter in model.parameters():
            parameter.data.clamp_(-bound, bound)
    return evaluate_plainly(points, model)


@grid
@pytest.mark.ci
def test_optimizers_that_a_loop_steps_in_turn(tmp_path: Path, workers: int) -> None:
    bound = 100.0
    source = IN_TURN.format(support=str(Path(__file__).parents[1]), bound=bound)
    make_task = script(source, tmp_path)
    ends = [simulated(make_task, workers, seed, epochs=2)["loss"] for seed in SEEDS]

    assert_close(ends, [in_turn_twin(seed, bound)["loss"] for seed in SEEDS])


@pytest.mark.ci
def test_a_loop_that_changes_parameters_after_a_step_is_named(
    harness: Harness, tmp_path: Path
) -> None:
    script(IN_TURN.format(support=str(Path(__file__).parents[1]), bound=0.1), tmp_path)

    _, job = on_workers(harness, tmp_path, "train.py", 2, epochs=2)

    assert job.state is JobState.SUCCEEDED, job.reason
    events = harness.events(job.id, "optimizer-uncorrected")
    assert {each["details"]["optimizer"] for each in events} == {"RMSprop and RMSprop"}


SOME_STEPS = IN_TURN.replace("    for optimizer in optimizers:", "    for optimizer in {chosen}:")


@pytest.mark.ci
def test_a_loop_that_steps_an_optimizer_less_often(tmp_path: Path) -> None:
    def run(chosen: str) -> float:
        support = str(Path(__file__).parents[1])
        source = SOME_STEPS.format(support=support, bound=100, chosen=chosen)
        return simulated(script(source, tmp_path), 2, epochs=1)["loss"]

    assert run("optimizers[: 1 + (session.global_step % 5 == 0)]") < 2.2
    # Read after the step of the first one, also for a worker's first batch
    assert (
        run("(e for e in optimizers if e is optimizers[0] or session.global_step % 5 == 0)") < 2.2
    )
    with pytest.raises(UserCodeError, match="without a step of each optimizer") as refused:
        run("optimizers[:1]")
    assert refused.value.remedy is not None
    assert "session.global_step" in refused.value.remedy


@pytest.mark.ci
def test_a_loop_that_steps_an_optimizer_less_often_is_named(
    harness: Harness, tmp_path: Path
) -> None:
    chosen = "optimizers[: 1 + (session.global_step % 5 == 0)]"
    source = SOME_STEPS.format(support=str(Path(__file__).parents[1]), bound=100, chosen=chosen)
    script(source, tmp_path)

    _, job = on_workers(harness, tmp_path, "train.py", 2, epochs=2)

    assert job.state is JobState.SUCCEEDED, job.reason
    assert harness.events(job.id, "optimizer-uncorrected")
