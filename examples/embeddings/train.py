"""Digits classified by pairs of neighboring pixels: a large table with sparse gradients."""

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

Batch = tuple[Tensor, Tensor]  # tokens int64 [n, 112], labels int64 [n]

#: Brightness levels of a pixel, 0…16.
LEVELS = 17
#: Horizontal and vertical pairs of neighbors in an image of 8×8.
PAIRS = 2 * 8 * 7


class PixelPairs(vcasgd.Task):
    """Table with a row for each pair of neighbors and each pair of their brightness levels.

    It has 112·17² = 32,368 rows. An image is the sum of its 112 rows.
    """

    batch_size = 16

    def __init__(self, width: int = 64, learning_rate: float = 0.3) -> None:
        self.width = width
        self.learning_rate = learning_rate

    def model(self) -> nn.Module:
        table = nn.EmbeddingBag(PAIRS * LEVELS**2, self.width, mode="sum")
        nn.init.normal_(table.weight, std=0.02)
        return nn.Sequential(table, nn.ReLU(), nn.Linear(self.width, 10))

    def dataset(self, split: str) -> TensorDataset:
        pixels, labels = load_digits(return_X_y=True)
        # The same seed everywhere, so that every machine has the same samples in each part.
        x_train, x_validation, y_train, y_validation = train_test_split(
            pixels, labels, test_size=0.2, stratify=labels, random_state=0
        )
        x, y = (x_train, y_train) if split == "train" else (x_validation, y_validation)
        return TensorDataset(_tokens(torch.tensor(x, dtype=torch.int64)), torch.tensor(y))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        # No momentum and no weight decay: they would change rows that no sample touched.
        return torch.optim.SGD(parameters, lr=self.learning_rate)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens, labels = batch
        return F.cross_entropy(model(tokens), labels)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        tokens, labels = batch
        scores = model(tokens)
        return {
            "loss": F.cross_entropy(scores, labels, reduction="sum"),
            "accuracy": (scores.argmax(1) == labels).sum(),
            "count": torch.tensor(len(labels)),
        }


def _tokens(pixels: Tensor) -> Tensor:
    """Return the row indices, int64 [n, 112], of images, int64 [n, 64]."""
    images = pixels.view(-1, 8, 8)
    beside = images[:, :, :-1] * LEVELS + images[:, :, 1:]
    above = images[:, :-1] * LEVELS + images[:, 1:]
    pairs = torch.cat([beside.flatten(1), above.flatten(1)], 1)
    return pairs + torch.arange(PAIRS) * LEVELS**2
