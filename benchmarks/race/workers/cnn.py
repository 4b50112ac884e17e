"""Model, data, and pace of the race, the same for every contender. Needs torch and numpy only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

#: Mean and standard deviation of the training pixels in 0…1.
MEAN, DEVIATION = 0.1307, 0.3081
LEARNING_RATE, MOMENTUM = 0.05, 0.9
SLOW_FACTOR = 4.0
#: File in a run's folder with the name of the machine that is slower.
SLOW_FILE = "slow"


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


class Pace:
    """Makes a step last as long as on a machine of its own, although machines share processors.

    A step of ``samples`` takes ``seconds`` for each sample, on the slow machine more.
    """

    def __init__(self, seconds: float, folder: Path, machine: str) -> None:
        self._seconds, self._slow, self._machine = seconds, folder / SLOW_FILE, machine

    @contextmanager
    def step(self, samples: int) -> Iterator[None]:
        """Wrap what a machine computes in a step, without the exchange of updates."""
        start = time.monotonic()
        yield
        self.rest(start, samples)

    def rest(self, start: float, samples: int) -> None:
        """Sleep for the rest of a step that began at ``start`` of the monotonic clock."""
        end = start + samples * self._seconds * self._factor()
        time.sleep(max(0.0, end - time.monotonic()))

    def _factor(self) -> float:
        try:
            return SLOW_FACTOR if self._slow.read_text() == self._machine else 1.0
        except OSError:
            return 1.0
