"""The digits, with steps that take as long as those of a larger model."""

from __future__ import annotations

import time

from torch import Tensor, nn
from train import Digits

from digits import Batch


class PacedDigits(Digits):
    """Each step takes ``step_seconds`` longer; what is learned stays the same."""

    def __init__(self, step_seconds: float, channels: int = 16, learning_rate: float = 0.1) -> None:
        super().__init__(channels, learning_rate)
        self.step_seconds = step_seconds

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        time.sleep(self.step_seconds)
        return super().loss(model, batch)
