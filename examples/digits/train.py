"""Handwritten digits, 8×8 pixels, from scikit-learn: nothing to download, trained in seconds."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import vcasgd

Batch = tuple[Tensor, Tensor]  # pixels float32 [n, 1, 8, 8] in 0…1, labels int64 [n]


class Digits(vcasgd.Task):
    """A small convolutional network; 1,437 images to train on and 360 to validate."""

    batch_size = 16

    def __init__(self, channels: int = 16, learning_rate: float = 0.1) -> None:
        self.channels = channels
        self.learning_rate = learning_rate

    def model(self) -> nn.Module:
        return nn.Sequential(
            *_block(1, self.channels),
            *_block(self.channels, 2 * self.channels),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(2 * self.channels * 4 * 4, 10),
        )

    def dataset(self, split: str) -> TensorDataset:
        pixels, labels = load_digits(return_X_y=True)
        # the same seed everywhere, so that every machine has the same samples in each part
        x_train, x_validation, y_train, y_validation = train_test_split(
            pixels, labels, test_size=0.2, stratify=labels, random_state=0
        )
        x, y = (x_train, y_train) if split == "train" else (x_validation, y_validation)
        images = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        return TensorDataset(images, torch.tensor(y))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        scores = model(images)
        return {
            "loss": F.cross_entropy(scores, labels, reduction="sum"),
            "accuracy": (scores.argmax(1) == labels).sum(),
            "count": torch.tensor(len(labels)),
        }


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
