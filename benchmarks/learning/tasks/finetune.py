"""Fine-tuning: a network that was trained on the digits 0 to 4 learns 5 to 9.

Its first two layers stay frozen. The first process trains the original network in a few seconds,
always with the same seed, and stores it; the others load it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import vcasgd

Batch = tuple[Tensor, Tensor]  # images float32 [n, 1, 28, 28], labels int64 [n] in 0…4

#: Mean and standard deviation of the training pixels in 0…1.
MEAN, DEVIATION = 0.1307, 0.3081
#: Digits below this one are those of the original network.
FIRST_NEW = 5
#: Modules of the network that are frozen: two convolutions with their normalization.
FROZEN = 6


class FineTune(vcasgd.Task):
    """``data`` is an ``.npz`` with MNIST, and ``cache`` the file of the original network.

    ``samples`` images are for training, and all test images of the new digits for validation.
    """

    batch_size = 64

    def __init__(
        self, data: str, cache: str, samples: int = 6400, learning_rate: float = 0.1
    ) -> None:
        self.data = Path(data)
        self.cache = Path(cache)
        self.samples = samples
        self.learning_rate = learning_rate

    def model(self) -> nn.Module:
        model = network()
        model.load_state_dict(original(self.data, self.cache))
        model[-1] = nn.Linear(64 * 4 * 4, FIRST_NEW)
        # In evaluation mode, the frozen layers normalize by the statistics of the old digits.
        model[:FROZEN].requires_grad_(False).eval()
        return model

    def dataset(self, split: str) -> TensorDataset:
        if split == "train":
            images, labels = digits(self.data, "train", new=True)
            return TensorDataset(images[: self.samples], labels[: self.samples])
        return TensorDataset(*digits(self.data, "test", new=True))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9)

    def schedule(self, progress: float) -> float:
        return 1 - progress

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


def network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32), (32, 64)):
        convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, FIRST_NEW))


def digits(data: Path, part: str, *, new: bool) -> Batch:
    """Return the images of the new or of the old digits, and their labels from 0 to 4."""
    with np.load(data) as arrays:
        pixels, labels = arrays[f"x_{part}"], arrays[f"y_{part}"].astype(np.int64)
    chosen = (labels >= FIRST_NEW) == new
    images = torch.from_numpy(pixels[chosen]).unsqueeze(1).float().div_(255)
    return images.sub_(MEAN).div_(DEVIATION), torch.from_numpy(labels[chosen]) % FIRST_NEW


def original(data: Path, cache: Path) -> dict[str, Tensor]:
    """Return the state of the original network; train and store it if it isn't stored."""
    if not cache.exists():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            state = _trained(*digits(data, "train", new=False)).state_dict()
        cache.parent.mkdir(parents=True, exist_ok=True)
        part = cache.with_suffix(f".{os.getpid()}")
        torch.save(state, part)
        part.replace(cache)
    return torch.load(cache, weights_only=True)


def _trained(images: Tensor, labels: Tensor) -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for chosen in torch.randperm(len(labels)).split(64):
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    return model
