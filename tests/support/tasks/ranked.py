"""A small classifier that can misbehave in one rank of a worker."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.utils.data import TensorDataset

import vcasgd


class Ranked(vcasgd.Task):
    """``fault`` is done once, by the process that moves the file ``marker`` away: the second step
    of a further rank. Without a ``marker``, a loss ``sums``, or further ranks train ``apart``."""

    batch_size = 12

    def __init__(
        self,
        optimizer: str = "adamw",
        fault: str = "",
        marker: str = "",
        norm: str = "",
        parallel: str = "ddp",
        precision: str | None = None,
        batch_size: int | None = None,
        *,
        convolves: bool = False,
    ) -> None:
        self.batch_size = batch_size or self.batch_size
        self.parallel, self.mixed_precision = parallel, precision
        self.parent = os.getppid()
        self.name, self.fault, self.marker = optimizer, fault, Path(marker)
        self.steps = 0
        self.norm, self.min_local_batch = norm, 1 if norm else None
        self.convolves = convolves

    def model(self) -> nn.Module:
        norm = [getattr(nn, self.norm)(6)] if self.norm else []
        if self.convolves:
            layers = nn.Unflatten(1, (2, 2, 1)), nn.Conv2d(2, 6, (2, 1)), nn.Flatten()
            model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(6, 3))
            return model.to(memory_format=torch.channels_last)
        return nn.Sequential(nn.Linear(4, 6, bias=not norm), *norm, nn.Tanh(), nn.Linear(6, 3))

    def dataset(self, split: str) -> TensorDataset:
        random = torch.Generator().manual_seed(1)
        return TensorDataset(
            torch.randn(118, 4, generator=random), torch.randint(0, 3, (118,), generator=random)
        )

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        if self.name == "sgd":
            return SGD(parameters, lr=0.1, momentum=0.9)
        return Adagrad(parameters) if self.name == "adagrad" else AdamW(parameters, lr=0.02)

    def schedule(self, progress: float) -> float:
        return 1 - progress / 2

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        if self.marker.name and self.steps == 2 and "vcasgd.worker.rank" in _command():
            self._misbehave()
        return self.compute(model, batch)

    def compute(self, model: nn.Module, batch: Any) -> Tensor:
        points, labels = batch
        total = F.cross_entropy(model(points), labels, reduction="sum")
        return total if self.fault == "sums" else total / len(labels)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if self.fault == "apart" and "vcasgd.worker.rank" in _command():
            raise ValueError("this rank can't evaluate")
        points, labels = batch
        return {
            "loss": F.cross_entropy(model(points), labels, reduction="sum"),
            "count": torch.tensor(len(labels)),
        }

    def _misbehave(self) -> None:
        try:
            self.marker.rename(self.marker.with_suffix(".done"))
        except FileNotFoundError:
            return
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "leaves":
            # As one that takes long to end, because its memory goes back first.
            os.close(int(sys.argv[1]))
        if self.fault in ("hangs", "leaves"):
            time.sleep(3600)
        raise ValueError("this rank has a fault")


class Paced(Ranked):
    """A sample takes ``seconds`` while there is a file ``folder``/hold.

    The file there named after a process has the samples of each of its steps.
    """

    batch_size = 40

    def __init__(self, samples: int, seconds: float, folder: str) -> None:
        super().__init__()
        self.samples, self.seconds, self.folder = samples, seconds, Path(folder)

    def dataset(self, split: str) -> TensorDataset:
        points, labels = super().dataset(split).tensors
        drawn = torch.arange(self.samples if split == "train" else 8) % len(points)
        return TensorDataset(points[drawn], labels[drawn])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        samples = len(batch[0])
        if (self.folder / "hold").exists():
            time.sleep(samples * self.seconds)
        with (self.folder / str(os.getpid())).open("a") as notes:
            notes.write(f"{samples}\n")
        return super().loss(model, batch)


def _command() -> str:
    return Path("/proc/self/cmdline").read_text().replace("\0", " ")
