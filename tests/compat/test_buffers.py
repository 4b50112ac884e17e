"""Buffers end as in a plain loop, whatever they are: statistics, counters, masks."""

from __future__ import annotations

import pytest
import torch
from support.compat import Case, Points, assert_as_plain, grid, simulated
from torch import Tensor, nn

from vcasgd.errors import SpecError

pytestmark = pytest.mark.usefixtures("one_thread")


class WithMask(nn.Module):
    """A network that mixes its inputs by attention under a causal mask."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.read = nn.Linear(features, 64)
        self.write = nn.Linear(64, classes)
        self.scores = nn.Parameter(torch.zeros(64, 64))
        self.register_buffer("mask", torch.full((64, 64), -torch.inf).triu(1))

    def forward(self, points: Tensor) -> Tensor:
        mixed = torch.softmax(self.scores + self.mask, 1)
        answers: Tensor = self.write(torch.relu(self.read(points)) @ mixed.T)
        return answers


class Masked(Points):
    samples = 1024

    def model(self) -> nn.Module:
        return WithMask(self.features, self.classes)


@grid
def test_a_mask_with_infinite_values(workers: int) -> None:
    assert_as_plain(Case(Masked), workers)


class Extremes(WithMask):
    def forward(self, points: Tensor) -> Tensor:
        self.mask.clamp_(min=-5.0)
        return super().forward(points)


class ChangesItsMask(Masked):
    def model(self) -> nn.Module:
        return Extremes(self.features, self.classes)


def test_infinite_values_that_change_are_refused() -> None:
    with pytest.raises(SpecError, match="mask of the model starts with values that aren't finite"):
        simulated(ChangesItsMask, 2)
