"""Ten overlapping clusters of points, and a small network that tells them apart."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import vcasgd

Batch = tuple[Tensor, Tensor]  # points float32 [n, 16], labels int64 [n]
CLASSES, FEATURES = 10, 16


class Blobs(vcasgd.Task):
    batch_size = 16

    def __init__(
        self,
        samples: int = 1600,
        learning_rate: float = 0.02,
        pause: float = 0.0,
        hold: str | None = None,
    ) -> None:
        """``pause`` is the seconds that each local step takes at least, while ``hold`` exists."""
        self.samples = samples
        self.learning_rate = learning_rate
        self.pause = pause
        self.hold = Path(hold) if hold is not None else None

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def dataset(self, split: str) -> TensorDataset:
        centers = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(1))
        number = self.samples if split == "train" else 2000
        noise = torch.Generator().manual_seed(2 if split == "train" else 3)
        labels = torch.randint(0, CLASSES, (number,), generator=noise)
        points = centers[labels] + 0.9 * torch.randn(number, FEATURES, generator=noise)
        return TensorDataset(points, labels)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        points, labels = batch
        if self.hold is None or self.hold.exists():
            time.sleep(self.pause)
        return F.cross_entropy(model(points), labels)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        points, labels = batch
        right = (model(points).argmax(1) == labels).sum()
        return {"accuracy": right, "count": torch.tensor(len(labels))}
