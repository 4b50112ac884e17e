"""Clipping, and other changes of gradients, end as in a plain loop."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compat.test_approximations import Hooked, HookedStep, changing_loop
from compat.test_optimizers import OPTIMIZERS, WITH_CLOSURE, points
from support.compat import (
    FewPoints,
    Metrics,
    Points,
    assert_as_plain,
    grid,
    loop_script,
    own_steps,
    simulated,
    train_plainly,
)
from torch import nn
from torch.optim import Optimizer

from vcasgd.task.task import Task

pytestmark = pytest.mark.usefixtures("one_thread")


EPOCHS = 3
#: Functions that clip.
IMPORT = "from torch.nn.utils import clip_grad_norm_, clip_grad_value_"


@grid
@pytest.mark.ci
def test_gradients_that_are_clipped_in_nearly_each_step(workers: int) -> None:
    assert_as_plain(points(OPTIMIZERS["AdamW"], clip=0.3), workers)


@grid
@pytest.mark.ci
@pytest.mark.parametrize("task", [HookedStep, Hooked])
def test_hooks_clip_the_gradient_of_the_whole_batch(task: type[Points], workers: int) -> None:
    assert_as_plain(task, workers, EPOCHS)


def clipped_by(clips: str) -> Callable[..., Metrics]:
    """Return a plain loop that clips."""

    def loop(task: Points, model: nn.Module, *others: Any) -> Metrics:
        names = {**vars(nn.utils), "model": model}
        clip = textwrap.dedent(f"    {clips}")
        return train_plainly(task, model, *others, before_step=lambda: exec(clip, names))

    return loop


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
    task = changing_loop(tmp_path, clips, before=IMPORT)

    assert_as_plain(task, workers, EPOCHS, twin=Points, loop=clipped_by(clips))


def scaled_loop(
    folder: Path, changes: str, loss: str, optimizer: str = "task.optimizer(model.parameters())"
) -> Callable[[], Task]:
    """Return a loop that scales its ``loss`` while gradients are computed, as in float16."""
    loop = own_steps(changes=f"scaler.unscale_(optimizer)\n    {changes}")
    loop = loop.replace("task.loss(model, batch).backward()", f"{loss}.backward()", 1)
    loop = loop.replace("optimizer.step()", "scaler.step(optimizer)\n    scaler.update()", 1)
    return loop_script(folder, loop, FewPoints, optimizer=optimizer, before=IMPORT)


@pytest.mark.ci
def test_a_scaler_does_not_scale_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    plain = loop_script(tmp_path, own_steps(changes=CLAMPS), FewPoints, name="plain.py")
    made = 'task.optimizer(model.parameters()); scaler = torch.amp.GradScaler("cpu")'
    scaled = scaled_loop(tmp_path, CLAMPS, "scaler.scale(task.loss(model, batch))", made)

    ends = [simulated(task, 4, epochs=2)["loss"] for task in (plain, scaled)]

    assert ends[1] == pytest.approx(ends[0], rel=1e-3)


@pytest.mark.ci
def test_hooks_get_the_scaled_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    # Given hooks of gradients that a loop scales, or not
    hook = "; model[0].weight.register_hook(lambda g: g.clamp({0}, -{0}))"
    made = "task.optimizer(model.parameters())" + hook
    plain = loop_script(
        tmp_path, own_steps(), FewPoints, optimizer=made.format(-1e-3), name="plain.py"
    )
    scaler = '; scaler = torch.amp.GradScaler("cpu", init_scale=1024)'
    loss = "scaler.scale(task.loss(model, batch))"
    scaled = scaled_loop(tmp_path, "pass", loss, made.format(-1e-3 * 1024) + scaler)

    # Then they change the mean gradient alike
    ends = [simulated(task, 4, epochs=2)["loss"] for task in (plain, scaled)]
    assert ends[1] == pytest.approx(ends[0], rel=1e-4)


def test_a_fused_optimizer_may_skip_a_step(tmp_path: Path) -> None:
    # Given gradients that overflow at first
    made = "torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)"
    made += '; scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)'
    clips, loss = "clip_grad_norm_(model.parameters(), 0.3)", "task.loss(model, batch) * 1e4"

    # Then several workers train on
    task = scaled_loop(tmp_path, clips, f"scaler.scale({loss})", made)
    assert simulated(task, 2, epochs=1)["loss"] < 2.5


#: A schedule by hand: each step sets the rate of the next one. That of the first one is too high.
RATES = (2e-2, 3e-3)
BY_HAND = """clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = {rate} * (1 - session.global_step / 200)
    continue"""


@grid
@pytest.mark.ci
def test_a_loop_that_clips_and_sets_the_rate_of_the_next_step(tmp_path: Path, workers: int) -> None:
    loop = BY_HAND.format(rate=RATES[1])
    first = f"torch.optim.AdamW(model.parameters(), lr={RATES[0]})"
    task = changing_loop(tmp_path, loop, before=IMPORT, optimizer=first)

    assert_as_plain(task, workers, EPOCHS, twin=Points, loop=by_hand_twin)


def by_hand_twin(task: Points, model: nn.Module, optimizer: Optimizer, *others: int) -> Metrics:
    (group,), (first, rate) = optimizer.param_groups, RATES
    group["lr"] = first

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)

    def set_rate(step: int) -> None:
        group["lr"] = rate * (1 - (step - 1) / 200)

    return train_plainly(task, model, optimizer, *others, before_step=clip, after_step=set_rate)


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
    loop = WITH_CLOSURE.format(epochs=EPOCHS, inside=inside, step=step)

    task = loop_script(tmp_path, loop)

    assert_as_plain(task, workers, EPOCHS, twin=Points, loop=clipped_by(CLAMPS))
