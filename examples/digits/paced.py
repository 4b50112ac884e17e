"""The digits, with images that take as long as with a larger model."""

from __future__ import annotations

import time

from torch import Tensor, nn
from train import Digits

from digits import Batch


class PacedDigits(Digits):
    """Each image takes ``image_seconds`` longer; what is learned stays the same."""

    def __init__(
        self, image_seconds: float, channels: int = 16, learning_rate: float = 0.025
    ) -> None:
        super().__init__(channels, learning_rate)
        self.image_seconds = image_seconds

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        time.sleep(self.image_seconds * len(batch[1]))
        return super().loss(model, batch)
