"""Second moments that one Adam takes over from another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from vcasgd.learning import second_moments

Make = Callable[[list[nn.Parameter]], Optimizer]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]


def trained(make: Make, steps: int, scale: float = 1.0) -> tuple[list[nn.Parameter], Optimizer]:
    """Return an optimizer that made steps with gradients of ``scale``, and its parameters."""
    mine = parameters()
    optimizer = make(mine)
    for _ in range(steps):
        for each in mine:
            each.grad = torch.full_like(each, scale)
        optimizer.step()
    return mine, optimizer


def moments_of(optimizer: Optimizer) -> Tensor:
    out = torch.empty(second_moments.count(optimizer))
    second_moments.read(optimizer, out)
    return out


@pytest.mark.parametrize("make", [Adam, AdamW])
def test_an_optimizer_continues_with_the_moments_of_another(make: Make) -> None:
    _, old = trained(make, 100, scale=3.0)
    mine = parameters()
    new = make(mine)

    assert second_moments.adopt(new, moments_of(old), second_moments.steps(old))

    assert moments_of(old).tolist() == pytest.approx([9.0] * 10)
    assert moments_of(new).tolist() == pytest.approx([9.0] * 10)
    assert second_moments.steps(new) == 100
    # When it makes a step
    for each in mine:
        each.grad = torch.full_like(each, 3.0)
    new.step()
    # Then the first moments have a tenth of the gradient, and the step is as short
    assert mine[0].tolist()[0] == pytest.approx([-1e-3 * 0.1] * 3, rel=0.01)


def test_without_them_the_first_step_has_full_length() -> None:
    mine, _ = trained(Adam, 1, scale=3.0)

    assert mine[0].tolist()[0] == pytest.approx([-1e-3] * 3)


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (Adam, 10),
        (AdamW, 10),
        (lambda mine: Adam(mine, amsgrad=True), 0),
        (lambda mine: SGD(mine, lr=0.1, momentum=0.9), 0),
        (torch.optim.NAdam, 0),
    ],
    ids=["Adam", "AdamW", "AMSGrad", "SGD", "NAdam"],
)
def test_only_plain_adam_has_them(make: Make, count: int) -> None:
    assert second_moments.count(make(parameters())) == count


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e-9, 1e31])
def test_values_that_no_second_moment_has_are_refused(bad: float) -> None:
    optimizer = Adam(parameters())
    moments = torch.ones(10)
    moments[7] = bad

    assert not second_moments.adopt(optimizer, moments, 100)
    assert second_moments.steps(optimizer) == 0


def test_a_parameter_without_gradients_gets_none() -> None:
    mine = parameters()
    old = Adam(mine)
    mine[0].grad = torch.ones_like(mine[0])
    old.step()
    new = Adam(others := parameters())

    assert second_moments.adopt(new, moments_of(old), 1)

    state: dict[str, Any] = new.state
    assert others[0] in state
    assert others[1] not in state
