"""The race's model and data as a task of vcasgd."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset

import vcasgd
from cnn import LEARNING_RATE, MOMENTUM, Digits, Pace, make_model

Batch = tuple[Tensor, Tensor]  # images float32 [n, 1, 28, 28], labels int64 [n]
#: Evaluated by a worker. The race judges the models afterwards, as those of all contenders.
VALIDATION_SAMPLES = 64


class RacedMnist(vcasgd.Task):
    """``pace`` is the seconds of a sample."""

    def __init__(self, data: str, folder: str, batch_size: int, pace: float) -> None:
        self.batch_size = batch_size
        self.data = Path(data)
        # Each machine has a notice file of its own.
        machine = Path(os.environ.get("VCASGD_NOTICE_FILE", "")).parent.name
        self.pace = Pace(pace, Path(folder), machine)
        self._started, self._samples = 0.0, 0
        self._watched: nn.Parameter | None = None

    def model(self) -> nn.Module:
        return make_model()

    def dataset(self, split: str) -> Dataset[Batch]:
        if split == "train":
            return DigitBatches(Digits(self.data, "train"), 60_000)
        return DigitBatches(Digits(self.data, "test"), VALIDATION_SAMPLES)

    def collate(self, samples: Any) -> Any:
        return samples  # DigitBatches returns whole batches.

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM, nesterov=True)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        self._started, self._samples = time.monotonic(), len(images)
        self._watch(next(model.parameters()))
        return F.cross_entropy(model(images), labels)

    def _watch(self, parameter: nn.Parameter) -> None:
        """Rest at the end of the backward pass, when the first parameter gets its gradient."""
        if parameter is not self._watched:
            self._watched = parameter
            parameter.register_post_accumulate_grad_hook(self._rest)

    def _rest(self, _parameter: Tensor) -> None:
        self.pace.rest(self._started, self._samples)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        loss = F.cross_entropy(model(images), labels, reduction="sum")
        return {"loss": loss, "count": torch.tensor(len(labels))}


class DigitBatches(Dataset[Batch]):
    """The first ``count`` digits."""

    def __init__(self, digits: Digits, count: int) -> None:
        self._digits, self._count = digits, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        return self._digits.batch(torch.tensor(indices))
