"""The audit's task with the mean of its samples as the loss, as ranks of a worker need it.

It counts exactly if all local steps have the same number of samples, a power of two.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vcasgd.chaos.task.audit import Audit


class CountedMean(Audit):
    def __init__(self, parallel: str = "ddp", **args: Any) -> None:
        super().__init__(**args)
        self.parallel = parallel

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return super().loss(model, batch) / len(batch)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=float(self.batch_size))
