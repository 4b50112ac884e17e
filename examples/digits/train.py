"""The digits as a task: a class that defines what to train. ``script.py`` does it in a loop."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import vcasgd
from digits import Batch, images, judge, network


class Digits(vcasgd.Task):
    """A small convolutional network with 1,437 training and 360 validation images."""

    batch_size = 16
    #: Parts of four samples are enough for the statistics of BatchNorm here.
    min_local_batch = 4

    def __init__(self, channels: int = 16, learning_rate: float = 0.025) -> None:
        self.channels = channels
        self.learning_rate = learning_rate

    def model(self) -> nn.Module:
        return network(self.channels)

    def dataset(self, split: str) -> TensorDataset:
        return images(split)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        pixels, labels = batch
        return F.cross_entropy(model(pixels), labels)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return judge(model, batch)
