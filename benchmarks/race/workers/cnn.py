"""Convolutional network of the race and its data. Needs torch and numpy only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

#: Mean and standard deviation of the training pixels in 0…1.
MEAN, DEVIATION = 0.1307, 0.3081
LEARNING_RATE, MOMENTUM = 0.05, 0.9


def make_model() -> nn.Module:
    """Return the model, with the same initial parameters in every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        *_block(1, 16, kernel=5),  # to 14×14
        *_block(16, 32, kernel=3),  # to 7×7
        *_block(32, 64, kernel=3),  # to 4×4
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def _block(inputs: int, outputs: int, kernel: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=2, padding=kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


class Digits:
    """All images of ``"train"`` or ``"test"`` in memory as bytes."""

    def __init__(self, path: Path, part: str) -> None:
        with np.load(path) as arrays:
            images, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
        self._images = torch.from_numpy(images).view(-1, 1, 28, 28)
        self._labels = torch.from_numpy(labels).to(torch.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return images, float32 [n, 1, 28, 28], and labels, int64 [n]."""
        images = self._images[indices].to(torch.float32).div_(255)
        return images.sub_(MEAN).div_(DEVIATION), self._labels[indices]

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches forever, each epoch in a new order."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self), generator=generator)
            for start in range(0, len(self) - size + 1, size):
                yield self.batch(order[start : start + size])


class DigitSteps:
    """Model, optimizer, and loss of one machine, which has an order of the digits of its own."""

    def __init__(self, data: Path, batch: int, seed: int) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, nesterov=True
        )
        self._batches = Digits(data, "train").batches(batch, seed)

    def loss(self, model: nn.Module) -> Tensor:
        """Return the loss of the next batch by the model, which may be wrapped."""
        images, labels = next(self._batches)
        return nn.functional.cross_entropy(model(images), labels)
