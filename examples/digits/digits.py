"""Handwritten digits of 8×8 pixels from scikit-learn, and a small network for them."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

Batch = tuple[Tensor, Tensor]  # pixels float32 [n, 1, 8, 8] in 0…1, labels int64 [n]


def images(split: str) -> TensorDataset:
    """Return 1,437 images for ``"train"`` or 360 for ``"validation"``."""
    pixels, labels = load_digits(return_X_y=True)
    # The same seed everywhere, so that every machine has the same samples in each part.
    x_train, x_validation, y_train, y_validation = train_test_split(
        pixels, labels, test_size=0.2, stratify=labels, random_state=0
    )
    x, y = (x_train, y_train) if split == "train" else (x_validation, y_validation)
    return TensorDataset(
        torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)
    )


def network(channels: int) -> nn.Module:
    return nn.Sequential(
        *_block(1, channels),
        *_block(channels, 2 * channels),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(2 * channels * 4 * 4, 10),
    )


def judge(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return sums over a batch."""
    pixels, labels = batch
    scores = model(pixels)
    return {
        "loss": F.cross_entropy(scores, labels, reduction="sum"),
        "accuracy": (scores.argmax(1) == labels).sum(),
        "count": torch.tensor(len(labels)),
    }


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
