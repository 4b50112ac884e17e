"""The race's models as tasks of vcasgd."""

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
from torch.utils.data import Dataset, TensorDataset

import vcasgd
from cnn import LEARNING_RATE, MOMENTUM, Digits, make_model
from pace import Pace
from transformer import LEARNING_RATE as TRANSFORMER_RATE
from transformer import PacedTransformer

Batch = tuple[Tensor, Tensor]  # images float32 [n, 1, 28, 28], labels int64 [n]
SAMPLES = 60_000
#: Evaluated by a worker. The race judges the models afterwards, as those of all contenders.
VALIDATION_SAMPLES = 64


class Paced(vcasgd.Task):
    """``pace`` is the seconds of a sample."""

    def __init__(self, folder: str, batch_size: int, pace: float) -> None:
        self.batch_size = batch_size
        # Each machine has a notice file of its own.
        machine = Path(os.environ.get("VCASGD_NOTICE_FILE", "")).parent.name
        self.pace = Pace(pace, Path(folder), machine)
        self._started, self._samples = 0.0, 0
        self._watched: nn.Parameter | None = None

    def begin(self, model: nn.Module, samples: int) -> None:
        """Begin a step, which rests once the first parameter gets its gradient, at its end."""
        self._started, self._samples = time.monotonic(), samples
        parameter = next(model.parameters())
        if parameter is not self._watched:
            self._watched = parameter
            parameter.register_post_accumulate_grad_hook(self._rest)

    def _rest(self, _parameter: Tensor) -> None:
        self.pace.rest(self._started, self._samples)


class RacedMnist(Paced):
    """The convolutional network."""

    def __init__(self, data: str, **paced: Any) -> None:
        super().__init__(**paced)
        self.data = Path(data)

    def model(self) -> nn.Module:
        return make_model()

    def dataset(self, split: str) -> Dataset[Batch]:
        if split == "train":
            return DigitBatches(Digits(self.data, "train"), SAMPLES)
        return DigitBatches(Digits(self.data, "test"), VALIDATION_SAMPLES)

    def collate(self, samples: Any) -> Any:
        return samples  # DigitBatches returns whole batches.

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM, nesterov=True)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        self.begin(model, len(images))
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        loss = F.cross_entropy(model(images), labels, reduction="sum")
        return {"loss": loss, "count": torch.tensor(len(labels))}


class RacedTransformer(Paced):
    """The transformer, whose samples are numbers."""

    def model(self) -> nn.Module:
        return PacedTransformer(os.getpid())

    def dataset(self, split: str) -> Dataset[Any]:
        return TensorDataset(torch.arange(SAMPLES if split == "train" else VALIDATION_SAMPLES))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=TRANSFORMER_RATE)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        self.begin(model, len(batch[0]))
        loss: Tensor = model()
        return loss

    def evaluate(self, _model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        return {"loss": torch.zeros(()), "count": torch.tensor(len(batch[0]))}


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
