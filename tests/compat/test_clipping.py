"""Clipping, and other changes of gradients, end as in a plain loop."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
from compat.test_approximations import CLIPS, Hooked, HookedStep
from compat.test_optimizers import OPTIMIZERS, WITH_CLOSURE, points
from support.compat import (
    SEEDS,
    Case,
    Points,
    assert_as_plain,
    assert_close,
    evaluate_plainly,
    grid,
    orders,
    script,
    simulated,
)
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


@grid
@pytest.mark.ci
def test_gradients_that_are_clipped_in_nearly_each_step(workers: int) -> None:
    assert_as_plain(Case(points(OPTIMIZERS["AdamW"], clip=0.3)), workers)


@grid
@pytest.mark.parametrize("task", [Hooked, HookedStep])
def test_hooks_clip_the_gradient_of_the_whole_batch(task: type[Points], workers: int) -> None:
    assert_as_plain(Case(task), workers)


def plainly_clipped(clips: str, seed: int, epochs: int) -> float:
    """Train in a plain loop that clips, and return the loss at its end."""
    task = Points()
    torch.manual_seed(seed)
    model = task.model()
    optimizer, data = task.optimizer(model.parameters()), task.dataset("train")
    for indices in orders(task.samples, epochs, seed, task.batch_size):
        optimizer.zero_grad()
        task.loss(model, task.collate([data[index] for index in indices])).backward()
        exec(textwrap.dedent(f"    {clips}"), {**vars(nn.utils), "model": model})
        optimizer.step()
    return evaluate_plainly(task, model)["loss"]


CLAMPS = "for each in model.parameters(): each.grad.data.clamp_(-0.01, 0.01)"
SCALES = """total = 0
    for each in model.parameters():
        total += each.grad.norm().item() ** 2
    if total**0.5 > 0.3:
        for each in model.parameters():
            each.grad.mul_(0.3 / total**0.5)"""


@pytest.mark.parametrize(
    "clips",
    [
        "clip_grad_norm_(model.parameters(), 0.3)",
        "clip_grad_value_(model.parameters(), 0.01)",
        "clip_grad_value_(model.parameters(), 0.05); clip_grad_norm_(model[0].weight, 0.01, 'inf')",
        CLAMPS,
        SCALES,
    ],
)
@grid
@pytest.mark.ci
def test_a_loop_clips_the_gradient_of_the_whole_batch(
    tmp_path: Path, clips: str, workers: int
) -> None:
    source = CLIPS.format(tests=str(Path(__file__).parents[1]), changes=clips)
    head = "from torch.nn.utils import clip_grad_norm_, clip_grad_value_"
    task = script(f"{head}\n{source}", tmp_path)

    ends = [simulated(task, workers, seed, epochs=3)["loss"] for seed in SEEDS]

    assert_close(ends, [plainly_clipped(clips, seed, 3) for seed in SEEDS])


#: A schedule by hand: each step sets the rate of the next one. That of the first one is too high.
RATES = (2e-2, 3e-3)
BY_HAND = """clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = {rate} * (1 - session.global_step / 200)
    continue"""


@grid
@pytest.mark.ci
def test_a_loop_that_clips_and_sets_the_rate_of_the_next_step(tmp_path: Path, workers: int) -> None:
    first, rate = RATES
    source = CLIPS.format(tests=str(Path(__file__).parents[1]), changes=BY_HAND.format(rate=rate))
    head = "from torch.nn.utils import clip_grad_norm_"
    begin = f'optimizer.param_groups[0]["lr"] = {first}\nsession ='
    task = script(f"{head}\n{source.replace('session =', begin, 1)}", tmp_path)

    ends = [simulated(task, workers, seed, epochs=3)["loss"] for seed in SEEDS]

    assert_close(ends, [by_hand_twin(seed, 3) for seed in SEEDS])


def by_hand_twin(seed: int, epochs: int) -> float:
    task, (first, rate) = Points(), RATES
    torch.manual_seed(seed)
    model, data = task.model(), task.dataset("train")
    optimizer = task.optimizer(model.parameters())
    optimizer.param_groups[0]["lr"] = first
    for step, indices in enumerate(orders(task.samples, epochs, seed, task.batch_size)):
        optimizer.zero_grad()
        task.loss(model, task.collate([data[index] for index in indices])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate * (1 - step / 200)
    return evaluate_plainly(task, model)["loss"]


@grid
@pytest.mark.ci
@pytest.mark.parametrize(
    ("inside", "step"),
    [
        (CLAMPS, "optimizer.step(closure)"),
        pytest.param(
            *("pass", f"closure()\n        {CLAMPS}\n        optimizer.step()"),
            marks=pytest.mark.extended,
        ),
    ],
    ids=["in the closure", "after it"],
)
def test_a_closure_changes_the_gradient_of_the_whole_batch(
    tmp_path: Path, inside: str, step: str, workers: int
) -> None:
    support = str(Path(__file__).parents[1])
    source = WITH_CLOSURE.format(support=support, epochs=3, inside=inside, step=step)
    task = script(source, tmp_path)

    ends = [simulated(task, workers, seed, epochs=3)["loss"] for seed in SEEDS]

    assert_close(ends, [plainly_clipped(CLAMPS, seed, 3) for seed in SEEDS])
