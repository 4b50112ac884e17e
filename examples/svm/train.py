"""A linear support vector machine on the digits: any loss with a gradient works."""

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

Batch = tuple[Tensor, Tensor]  # pixels float32 [n, 64] in 0…1, labels int64 [n]


class Svm(vcasgd.Task):
    """One hyperplane for each digit against all others (Weston and Watkins 1998)."""

    batch_size = 16

    def __init__(self, learning_rate: float = 0.1, decay: float = 1e-3) -> None:
        self.learning_rate = learning_rate
        self.decay = decay

    def model(self) -> nn.Module:
        return nn.Linear(64, 10)

    def dataset(self, split: str) -> TensorDataset:
        pixels, labels = load_digits(return_X_y=True)
        # The same seed everywhere, so that every machine has the same samples in each part.
        x_train, x_validation, y_train, y_validation = train_test_split(
            pixels, labels, test_size=0.2, stratify=labels, random_state=0
        )
        x, y = (x_train, y_train) if split == "train" else (x_validation, y_validation)
        return TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        # The decay controls the margin: half of the squared norm of the weights, times the decay.
        return torch.optim.SGD(parameters, lr=self.learning_rate, weight_decay=self.decay)

    def schedule(self, progress: float) -> float:
        return 1 - progress

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        pixels, labels = batch
        return 10 * F.multi_margin_loss(model(pixels), labels)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        pixels, labels = batch
        scores = model(pixels)
        return {
            "loss": 10 * F.multi_margin_loss(scores, labels, reduction="sum"),
            "accuracy": (scores.argmax(1) == labels).sum(),
            "count": torch.tensor(len(labels)),
        }
