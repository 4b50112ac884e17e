"""A GPT whose parts are in several processes, on few and short texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from gpt import Gpt
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Subset

SAMPLES = 64


class GptInParts(Gpt):
    parallel = "fsdp"

    def __init__(self, *shape: int, optimizer: str = "adamw", **more: int) -> None:
        super().__init__(*shape, **more)
        self.name = optimizer

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        if self.name == "sgd":
            return torch.optim.SGD(parameters, lr=1e-2)
        return super().optimizer(parameters)

    def dataset(self, split: str) -> Any:
        return Subset(super().dataset(split), range(SAMPLES if split == "train" else 8))
