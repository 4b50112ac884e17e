"""A vector of any size behind steps of a given pace: the exchange of a large model, without its
arithmetic."""

from __future__ import annotations

import os
import struct
import time
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

import vcasgd

Batch = tuple[Tensor, Tensor]  # float32 [n, FEATURES], labels int64 [n]
FEATURES, TENSORS = 8, 24
VALIDATION_SAMPLES = 1_000
#: Samples that a process has trained, and when.
COUNT = struct.Struct("<qd")


class LargeVector(nn.Module):
    """``millions`` of parameters in equal tensors without a gradient's use, and a small head."""

    def __init__(self, millions: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        length = int(millions * 1e6) // TENSORS
        self.rest = nn.ParameterList(
            nn.Parameter(torch.randn(length, generator=generator) * 0.02) for _ in range(TENSORS)
        )
        self.head = nn.Linear(FEATURES, 2)

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.head(features)
        return scores


class PacedVector(vcasgd.Task):
    """Steps of ``batch_size`` samples take ``step_ms`` without using the processor, as a GPU's.

    Each process writes the samples that it has trained into a file of the folder ``counts``, if
    there is one; see :func:`trained`.
    """

    evaluation_batch_size = VALIDATION_SAMPLES

    def __init__(
        self,
        millions: float,
        step_ms: float,
        batch_size: int = 32,
        samples: int = 200_000,
        *,
        all_gradients: bool = False,
        counts: str | None = None,
    ) -> None:
        self.millions, self.step_seconds = millions, step_ms / 1000
        self.batch_size, self.samples = batch_size, samples
        self.all_gradients, self.counts = all_gradients, counts
        self._trained = 0

    def model(self) -> nn.Module:
        return LargeVector(self.millions)

    def dataset(self, split: str) -> Dataset[Batch]:
        count = self.samples if split == "train" else VALIDATION_SAMPLES
        features = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(1))
        return TensorDataset(features, (features.sum(1) > 0).long())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        features, labels = batch
        end = time.perf_counter() + self.step_seconds * len(labels) / self.batch_size
        loss = functional.cross_entropy(model(features), labels)
        if self.all_gradients:
            # Processes that share a batch add them up, although they are 0.
            loss = loss + 0.0 * sum(each.sum() for each in model.parameters())
        time.sleep(max(0.0, end - time.perf_counter()))
        if self.counts is not None:
            self._trained += len(labels)
            _write_count(self.counts, self._trained)
        return loss

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        features, labels = batch
        scores = model(features)
        return {
            "loss": functional.cross_entropy(scores, labels, reduction="sum"),
            "accuracy": (scores.argmax(1) == labels).sum(),
            "count": torch.tensor(len(labels)),
        }


@cache
def _count_file(folder: str) -> int:
    return os.open(Path(folder, str(os.getpid())), os.O_CREAT | os.O_WRONLY)


def _write_count(folder: str, samples: int) -> None:
    """Replace this process's count, and the time of it. A step waits for no disk."""
    os.pwrite(_count_file(folder), COUNT.pack(samples, time.time()), 0)


def trained(folder: Path) -> dict[str, tuple[int, float]]:
    """Return the samples that each process has trained, and the time of its last step."""
    return {each.name: COUNT.unpack(each.read_bytes()) for each in folder.iterdir()}
