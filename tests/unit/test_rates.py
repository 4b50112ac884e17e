"""Schedules and gradient clipping, on parameters whose steps can be computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vcasgd
from vcasgd.errors import NonFiniteLoss, SpecError, UserCodeError
from vcasgd.learning.rates import Rates, clip
from vcasgd.task.place import Place


class Falling(vcasgd.Task):
    def schedule(self, progress: float) -> float:
        return 1 - progress


def parameters(*gradients: float) -> list[torch.nn.Parameter]:
    result = []
    for gradient in gradients:
        result.append(torch.nn.Parameter(torch.zeros(1)))
        result[-1].grad = torch.tensor([gradient])
    return result


def test_the_schedule_scales_each_groups_own_rate() -> None:
    first, second = parameters(1.0, 1.0)
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 1.0}, {"params": [second], "lr": 4.0}]
    optimizer = torch.optim.SGD(groups)
    rates = Rates(Falling(), optimizer)

    for progress in (0.5, 0.75):
        rates.follow(Place(progress))
        optimizer.step()

    assert (first.item(), second.item()) == (-0.75, -3.0)


def test_the_rate_is_constant_without_a_schedule() -> None:
    optimizer = torch.optim.SGD(parameters(1.0), lr=0.1)

    Rates(vcasgd.Task(), optimizer).follow(Place(0.99))

    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("factor", [-0.1, math.nan, math.inf, "fast", None])
def test_an_invalid_factor_is_an_error_of_the_user(factor: Any) -> None:
    class Wrong(vcasgd.Task):
        def schedule(self, progress: float) -> float:
            return factor

    with pytest.raises(UserCodeError, match=r"^schedule "):
        Rates(Wrong(), torch.optim.SGD(parameters(1.0))).follow(Place(0.25))


class Clipped(vcasgd.Task):
    clip_norm = 1.0


def test_all_gradients_are_scaled_together() -> None:
    first, second = parameters(3.0, 4.0)

    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}])

    for task, gradients in ((vcasgd.Task(), [3.0, 4.0]), (Clipped(), [0.6, 0.8])):
        clip(task, optimizer, 1)
        assert [float(each.grad) for each in (first, second)] == pytest.approx(gradients, rel=1e-5)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8))
def test_clipping_bounds_the_norm_and_keeps_small_gradients(gradients: list[float]) -> None:
    clipped = parameters(*gradients)
    norm = math.hypot(*gradients)

    clip(Clipped(), torch.optim.SGD(clipped), 1)

    after = [each.grad.item() for each in clipped if each.grad is not None]
    assert math.hypot(*after) <= 1 + 1e-4
    if norm < 0.99:
        assert after == gradients


def test_a_gradient_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(NonFiniteLoss, match="the norm of the gradient is inf in local step 7"):
        clip(Clipped(), torch.optim.SGD(parameters(math.inf, 1.0)), 7)


@pytest.mark.parametrize("norm", [0, -1.0, True, "1", math.nan, math.inf])
def test_an_invalid_norm_is_an_error(norm: Any) -> None:
    task = vcasgd.Task()
    task.clip_norm = norm

    with pytest.raises(SpecError, match="task: clip_norm is"):
        clip(task, torch.optim.SGD(parameters(1.0)), 1)
