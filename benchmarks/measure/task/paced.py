"""Task whose local steps take time, but no processor: ``pace`` seconds for each ``share`` samples.

So all workers of one computer train as fast as they would on machines of their own. The machine
that is named in the file ``slow`` takes ``slower`` times as long. Steps take time only while the
file ``hold`` exists.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import vcasgd

FEATURES, CLASSES = 64, 10


class Paced(vcasgd.Task):
    def __init__(
        self, samples: int, batch_size: int, share: int, pace: float, slower: float,
        hold: str, slow: str,
    ) -> None:  # fmt: skip
        self.samples = samples
        self.batch_size = batch_size
        self.seconds_per_sample = pace / share
        self.slower = slower
        self.hold, self.slow = Path(hold), Path(slow)
        # Each machine has a notice file of its own.
        self.machine = Path(os.environ.get("VCASGD_NOTICE_FILE", "")).parent.name

    def model(self) -> nn.Module:
        return nn.Linear(FEATURES, CLASSES)

    def dataset(self, split: str) -> Dataset[tuple[Tensor, ...]]:
        count = self.samples if split == "train" else 64
        inputs = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, classes = batch
        if self.hold.exists():
            time.sleep(len(inputs) * self.seconds_per_sample * self._factor())
        return nn.functional.cross_entropy(model(inputs), classes)

    def _factor(self) -> float:
        try:
            return self.slower if self.slow.read_text() == self.machine else 1.0
        except OSError:
            return 1.0

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        inputs, classes = batch
        loss = nn.functional.cross_entropy(model(inputs), classes, reduction="sum")
        return {"count": torch.tensor(len(inputs)), "loss": loss}
