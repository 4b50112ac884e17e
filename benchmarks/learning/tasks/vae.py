"""The variational autoencoder of PyTorch's examples, on MNIST, with the settings it has there.

Nobody tuned it, or the default settings of a job, for this benchmark.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

import vcasgd

PIXELS, HIDDEN, LATENT = 28 * 28, 400, 20


class Vae(vcasgd.Task):
    """``data`` is an ``.npz`` with MNIST."""

    batch_size = 128

    def __init__(self, data: str, learning_rate: float = 1e-3) -> None:
        self.data = Path(data)
        self.learning_rate = learning_rate

    def model(self) -> nn.Module:
        return Autoencoder()

    def dataset(self, split: str) -> Dataset[tuple[Tensor, ...]]:
        with np.load(self.data) as arrays:
            pixels = arrays["x_train" if split == "train" else "x_test"]
        return TensorDataset(torch.from_numpy(pixels).view(-1, PIXELS).float().div_(255))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.Adam(parameters, lr=self.learning_rate)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return _losses(model, batch).mean()

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        losses = _losses(model, batch)
        return {"loss": losses.sum(), "count": torch.tensor(len(losses))}


class Autoencoder(nn.Module):
    """Network from images ``[batch, 784]`` to logits, means, and log variances."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(PIXELS, HIDDEN)
        self.mean = nn.Linear(HIDDEN, LATENT)
        self.log_variance = nn.Linear(HIDDEN, LATENT)
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, PIXELS)
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.encoder(images))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean
        if self.training:
            code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


def _losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the negative evidence lower bound of each image in nats (arXiv:1312.6114, eq. 10).

    In evaluation mode, the reconstruction is that of the mean code instead of a sample.
    """
    (images,) = batch
    logits, mean, log_variance = model(images)
    errors = F.binary_cross_entropy_with_logits(logits, images, reduction="none").sum(1)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
    return errors + divergence
